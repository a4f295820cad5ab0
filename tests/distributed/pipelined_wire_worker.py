"""Script for `launch`: what goes over the wire, what is refused before, and what becomes of the others' failures."""

from collections import Counter

import torch
from pipelined_setup import meshes, part_of, pipelined, relative, routing, whole_experts
from ranks import main, mesh_of
from torch import distributed
from torch.utils.checkpoint import checkpoint

from hf_longmoe.schedules.dispatch import GatedMLP, PipelinedDispatch, PipelineSizes
from hf_longmoe.schedules.dispatch.exchange import ExchangeCaps
from hf_longmoe.schedules.dispatch.foreign import Lending
from hf_longmoe.schedules.replay import checkpoint_once, pin_top_k
from hf_longmoe.schedules.wire import GroupWire

HIDDEN, EXPERTS = 16, 8


class Recording:
    """A `Wire` that keeps count: gathers, and exchanges by the width of what is exchanged."""

    def __init__(self, wire):
        self.wire, self.calls = wire, Counter()

    def __getattr__(self, name):
        return getattr(self.wire, name)

    def gather(self, row):
        self.calls["gather"] += 1
        return self.wire.gather(row)

    def exchange(self, send, received, sent):
        self.calls[str(send.shape[1])] += 1
        return self.wire.exchange(send, received, sent)


def inputs(tokens, k=3, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + distributed.get_rank())
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    w = torch.rand(tokens, k, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return x, routing("skew", tokens, k, EXPERTS, distributed.get_world_size(), generator), w


def ours(record=None, layout="world", dtype=torch.float64, fresh=False, **config):
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    ep_mesh, tp_mesh = meshes(layout)
    if fresh:
        ep_mesh = mesh_of([list(range(ranks))], "ep")
    part = part_of(whole_experts(dtype=dtype), rank, ranks)
    implementation = pipelined(part, ep_mesh, tp_mesh, saved_after=False, record=record, **config)
    implementation.wire = Recording(implementation.wire)
    return part, implementation


def counts(case):
    """The calls of a step's two halves, checkpointed, and the plan's waves."""
    record = []
    _, layer = ours(record.append, budget=case["budget"], imbalance=case["imbalance"])
    x, index, w = inputs(25)
    region = checkpoint_once(layer) if case["pinned"] else layer
    y = checkpoint(region, x, index, w, use_reentrant=False)
    forward, layer.wire.calls = layer.wire.calls, Counter()
    y.sum().backward()
    plan = record[0].whole.plan
    waves = range(plan.num_waves)
    return {
        "forward": forward,
        "backward": layer.wire.calls,
        "waves": plan.num_waves,
        "fetching": sum(plan.moves_weights(wave) for wave in waves),
        "returning": sum(plan.returns_weights(wave) for wave in waves),
    }


class NearTies:
    """While `flipping`, every `topk` takes the runner-up for its last choice, as rounding may at a near-tie."""

    def __init__(self):
        self.flipping, self.asked, self.stock = False, 0, torch.topk

    def __call__(self, scores, k):
        seen = scores.detach()
        if self.flipping:
            self.asked += 1
            last, runner_up = seen.argsort(-1, descending=True)[..., k - 1 : k + 1].split(1, dim=-1)
            swapped = seen.scatter(-1, last, seen.gather(-1, runner_up))
            seen = swapped.scatter(-1, runner_up, seen.gather(-1, last))
        index = self.stock(seen, k)[1]
        return scores.gather(-1, index), index


def flip(case):
    """Gradients of a router and of all behind it, with the replay's choices flipped, against those without."""
    generator = torch.Generator().manual_seed(5)
    router = torch.randn(EXPERTS, HIDDEN, generator=generator, dtype=torch.float64)
    ties, found = NearTies(), []
    for flipped in (False, True):
        part, experts = ours(budget=40_000)
        leaf, (x, _, _) = router.clone().requires_grad_(), inputs(25)

        def layer(x, leaf=leaf, experts=experts):
            pin_top_k(True)
            scores, index = ties(x @ leaf.T, 3)
            pin_top_k(False)
            return x + experts(x, index, scores.softmax(-1))

        region = checkpoint_once(layer) if case["pinned"] else layer
        y = checkpoint(region, x, use_reentrant=case["reentrant"])
        ties.flipping = flipped
        y.square().sum().backward()
        ties.flipping = False
        found.append([x.grad, leaf.grad, *(p.grad for p in part.parameters())])
    return {"asked": ties.asked, "errors": [relative(b, a) for a, b in zip(*found, strict=True)]}


def refused(case):
    """What a rank says where rank 1 was given something else."""
    odd = distributed.get_rank() == 1
    config = {"budget": 40_000, "imbalance": 1.3, "overlap": 1, **(case.get("config", {}) if odd else {})}
    usual = case.get("usual", "float32")
    dtype, held = (getattr(torch, case.get(name, usual) if odd else usual) for name in ("dtype", "experts"))
    part, layer = ours(dtype=held, **config)
    part.requires_grad_(not (odd and case.get("frozen")))
    x, index, w = inputs(9, k=case.get("k", 3) if odd else 3, dtype=dtype)
    try:
        layer(x, index, w)
    except ValueError as error:
        return {"error": str(error), "calls": layer.wire.calls}
    return {"error": None, "calls": layer.wire.calls}


def batches(case):
    """What ranks of tensor-parallel groups say of their batches; `odd` are ranks with one of their own."""
    rank = distributed.get_rank()
    ep_mesh, tp_mesh = mesh_of([[0, 1, 2, 3]], "ep"), mesh_of([[0, 1], [2, 3]], "tp")
    layer = pipelined(part_of(whole_experts(), rank, 4), ep_mesh, tp_mesh, budget="1MiB")
    generator = torch.Generator().manual_seed(rank if rank in case["odd"] else 100 + rank // 2)
    tokens = case["tokens"] + (case.get("more", 0) if rank in case["odd"] else 0)
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    x += case.get("noise", 0) * rank * torch.linspace(-1, 1, HIDDEN, dtype=torch.float64)
    index = routing("random", tokens, 3, EXPERTS, 4, generator)
    try:
        layer(x, index, torch.ones(tokens, 3, dtype=torch.float64))
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


class Breaks(torch.nn.Module):
    """An activation that breaks after so many times once it is armed."""

    def __init__(self, act, times):
        super().__init__()
        self.act, self.left, self.armed = act, times, False

    def forward(self, gate):
        self.left -= self.armed
        if self.left < 0:
            raise ArithmeticError("the kernel has broken")
        return self.act(gate)


def fails(case):
    """What each rank says where rank 1 fails in a tile of `case["within"]`."""
    part, layer = ours(fresh=True, budget=40_000, imbalance=case["imbalance"], kernel=case["kernel"])
    part.act_fn = Breaks(part.act_fn, case["after"])
    x, index, w = inputs(25)
    said, within = {"forward": None, "backward": None}, "forward"
    try:
        part.act_fn.armed = distributed.get_rank() == 1 and case["within"] == within
        y = checkpoint(checkpoint_once(layer), x, index, w, use_reentrant=False)
        within = "backward"
        part.act_fn.armed = distributed.get_rank() == 1 and case["within"] == within
        y.sum().backward()
    except Exception as error:
        said[within] = f"{type(error).__name__}: {error}"
    return said


def borrowed(case):
    """The most bytes of borrowed weights and their gradients that are held at the end of a wave's tiles."""
    rank, size, hidden, count, tokens = distributed.get_rank(), distributed.get_world_size(), 16, 8, 256
    expert = 3 * hidden * hidden * 4
    caps = ExchangeCaps(
        rows=64, foreign=4 * expert, weight_bytes=expert, gradient_bytes=expert, imbalance=1.1, depth=1
    )
    held, drop = [], Lending.drop

    def watched(self, wave):
        weights = sum(view.nbytes for views in self._weights.values() for view in views)
        held.append(weights + sum(rows.nbytes for rows in self._going.values()))
        drop(self, wave)

    Lending.drop = watched
    try:
        record, generator = [], torch.Generator().manual_seed(rank)
        schedule = PipelinedDispatch(
            GroupWire(distributed.group.WORLD), PipelineSizes(caps, 64, None, None, None, 0), False, record.append
        )
        shapes = [(count, 2 * hidden, hidden), (count, hidden, hidden)]
        params = [torch.randn(s, generator=generator).requires_grad_(case["train"]) for s in shapes]
        x = torch.randn(tokens, hidden, generator=generator).requires_grad_()
        index = (torch.arange(tokens) % count)[:, None]  # all to rank 0's
        block = GatedMLP(torch.nn.functional.silu, silu=True)
        schedule(x, index, torch.rand(tokens, 1, generator=generator), block, params).sum().backward()
    finally:
        Lending.drop = drop
    return {"held": max(held), "cap": caps.foreign, "moves": len(record[0].whole.plan.moves), "size": size}


KINDS = {"borrowed": borrowed, "counts": counts, "flip": flip, "refused": refused, "batches": batches, "fails": fails}


if __name__ == "__main__":
    main(lambda case: KINDS[case["kind"]](case))
