"""Script for `launch`: what a step of `ring_cross_entropy` holds beside what any step holds, and what it sends."""

from collections import Counter

import torch
from ranks import main
from ring_worker import Head
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_longmoe.peaks import StorageProbe
from hf_longmoe.schedules.wire import GroupWire


class Largest(TorchDispatchMode):
    """The most bytes of one storage that an operator has returned."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.found = max(self.found, *sizes, 0)
        return out


class Recording:
    """A `Wire` that adds up the bytes sent to others by what a row of them is: "rows" of H, or "few" numbers."""

    def __init__(self, wire, hidden):
        self.wire, self.hidden, self.sent = wire, hidden, Counter()

    def __getattr__(self, name):
        return getattr(self.wire, name)

    def gather(self, row):
        self.sent["gather"] += 1
        return self.wire.gather(row)

    def exchange(self, send, received, sent):
        before = self.wire.sent_bytes
        pending = self.wire.exchange(send, received, sent)
        kind = "rows" if send.shape[1:] == (self.hidden,) else "few"
        self.sent[kind] += self.wire.sent_bytes - before
        return pending


def peak(case):
    """
    Bytes of one step on this rank. "beyond": at once, less all that is excluded (hidden states, shard, labels, their
    gradients, the loss); "beside": at once, of what is not excluded; "largest": of one storage.
    """
    head = Head(case, getattr(torch, case.get("dtype", "float32")))
    leaves = head.leaves()
    labels = head.labels[head.own_tokens(head.rank)].clone()
    wire = GroupWire(distributed.group.WORLD)
    with Largest() as largest, StorageProbe() as probe:
        probe.tag("parameters", [*leaves, labels])
        loss = head.ring(leaves, labels=labels, wire=wire)
        loss.backward()
        made = [loss.detach(), *(leaf.grad for leaf in leaves if leaf is not None and leaf.requires_grad)]
        probe.tag("parameters", made)
    report = probe.report()
    beyond = report.total - report.components["parameters"].peak
    return {"beyond": beyond, "beside": report.components["other"].peak, "largest": largest.found}


def sent(case):
    """Bytes of a forward and of its backward to the other ranks, by kind."""
    head = Head(case, getattr(torch, case.get("dtype", "float64")))
    leaves, found = head.leaves(), {}
    wire = Recording(GroupWire(distributed.group.WORLD), head.hidden.shape[1])
    loss = head.ring(leaves, wire=wire)
    found["forward"], wire.sent = wire.sent, Counter()
    if loss.requires_grad:
        loss.backward()
    return {**found, "backward": wire.sent, "all": wire.sent_bytes}


KINDS = {"peak": peak, "sent": sent}


if __name__ == "__main__":
    main(lambda case: KINDS[case["kind"]](case))
