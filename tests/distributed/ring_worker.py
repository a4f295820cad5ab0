"""Script for `launch`: `ring_cross_entropy` beside one process that has all tokens and the whole weight."""

import torch
import torch.nn.functional as F
from pipelined_setup import relative
from ranks import main
from torch import distributed

from hf_longmoe.schedules.vocab import LogitTransform
from hf_longmoe.schedules.vocab import fold as fold_module
from hf_longmoe.schedules.vocab.ring import ring_cross_entropy
from hf_longmoe.schedules.wire import GroupWire

HIDDEN = 12


class Head:
    """
    All tokens and the whole weight of a case, the same on every rank, and which of them are this rank's.

    Case: `vocab`; `tokens` of each rank; `masked`, the ranks without labels ("some" masks tokens of all); `bias`;
    `same`, whether all ranks have all tokens;
    `frozen`, a list of "hidden", "shard", "bias"; `softcap`, `scale`, `smoothing`, `z_loss`, `items`; `hidden` (H).
    """

    def __init__(self, case, dtype=torch.float64, seed=0):
        self.case, self.dtype = case, dtype
        self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        self.tokens = case["tokens"]
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        hidden, vocab = case.get("hidden", HIDDEN), case["vocab"]
        self.hidden, self.weight = draw(sum(self.tokens), hidden), draw(vocab, hidden)
        self.bias = draw(vocab) if case.get("bias") else None
        self.labels = torch.randint(vocab, (sum(self.tokens),), generator=generator)
        if case.get("masked") == "some":
            self.labels[torch.rand(len(self.labels), generator=generator) < 0.4] = -100
        else:
            for rank in case.get("masked", ()):
                self.labels[self.own_tokens(rank)] = -100

    def own_tokens(self, rank):
        if self.case.get("same"):
            return slice(None)
        start = sum(self.tokens[:rank])
        return slice(start, start + self.tokens[rank])

    def own_entries(self, rank):
        vocab, each = len(self.weight), -(-len(self.weight) // self.ranks)
        return slice(min(vocab, rank * each), min(vocab, (rank + 1) * each))

    def items(self, rank):
        """What a rank's sum is divided by, as the case wants it."""
        items = self.case.get("items")
        return torch.tensor(float(items[rank])) if self.case.get("items_as_tensor") else items and items[rank]

    def leaves(self):
        """This rank's hidden states, part of the weight and part of the bias."""
        parts = [self.hidden[self.own_tokens(self.rank)], self.weight[self.own_entries(self.rank)]]
        parts.append(None if self.bias is None else self.bias[self.own_entries(self.rank)])
        return [
            part if part is None else part.clone().requires_grad_(name not in self.case.get("frozen", ()))
            for name, part in zip(("hidden", "shard", "bias"), parts, strict=True)
        ]

    def ring(self, leaves, **more):
        case = self.case
        hidden, shard, bias = leaves
        settings = dict(
            labels=self.labels[self.own_tokens(self.rank)],
            wire=GroupWire(distributed.group.WORLD),
            bias=bias,
            budget=case.get("budget", 20_000),
            travel=case["travel"],
            same_tokens=bool(case.get("same")),
            num_items=self.items(self.rank),
            transform=LogitTransform(case.get("scale", 1.0), case.get("softcap")),
            label_smoothing=case.get("smoothing", 0.0),
            z_loss=case.get("z_loss", 0.0),
            weight_scale=case.get("weight_scale", 1.0),
        )
        return ring_cross_entropy(hidden, shard, **{**settings, **more})

    def stock_losses(self, hidden, weight, bias):
        """Of every rank, in one process, by torch alone: its own mean, or its sum over the items."""
        case, found = self.case, []
        z = F.linear(hidden, weight, bias)
        z = (z if self.dtype == torch.float64 else z.float()) * case.get("scale", 1.0)
        if case.get("softcap"):
            z = case["softcap"] * torch.tanh(z / case["softcap"])
        for rank in range(self.ranks):
            own, labels = z[self.own_tokens(rank)], self.labels[self.own_tokens(rank)]
            valid = (labels != -100).sum().clamp_min(1)
            total = F.cross_entropy(own, labels, reduction="sum", label_smoothing=case.get("smoothing", 0.0))
            lse = own.logsumexp(1) if len(own) else own.sum(1)
            total = total + case.get("z_loss", 0.0) * lse[labels != -100].square().sum()
            items = self.items(rank)
            found.append(total / (valid if items is None else items))
        return found

    def expected(self, upstream):
        """
        This rank's loss, and its gradients of the sum of all ranks' losses times `upstream`, by float64; of ranks with
        the same tokens, of the one loss that they share.
        """
        whole = [
            t if t is None else t.detach().double().clone().requires_grad_()
            for t in (self.hidden, self.weight, self.bias)
        ]
        losses = self.stock_losses(*whole)
        factors = [upstream[0], *[0.0] * (self.ranks - 1)] if self.case.get("same") else upstream
        sum(loss * factor for loss, factor in zip(losses, factors, strict=True)).backward()
        entries, scale = self.own_entries(self.rank), self.case.get("weight_scale", 1.0)
        grads = [whole[0].grad[self.own_tokens(self.rank)], whole[1].grad[entries] * scale]
        grads.append(None if self.bias is None else whole[2].grad[entries] * scale)
        return losses[self.rank].detach(), grads


def worst(got, want):
    """The largest relative error of tensors; `None` must be `None` in both."""
    pairs = list(zip(got, want, strict=True))
    assert all((a is None) == (b is None) for a, b in pairs), [a is None for a in got]
    return max((relative(a, b) for a, b in pairs if a is not None), default=0.0)


def exact(case):
    """
    The largest errors of the loss and of each gradient. Case: as `Head`'s; `dtype`, `travel`, `budget`,
    `weight_scale`; `steps` for gradient accumulation; `twice` for two backwards through one graph, `again` for a
    second run that must give the same bits, `no_grad`.
    """
    errors, steps = [], case.get("steps", 1)
    heads = [Head(case, getattr(torch, case.get("dtype", "float64")), seed) for seed in range(steps)]
    leaves, wanted = heads[0].leaves(), None
    rank, upstream = heads[0].rank, [1.7 + 0.7 * rank * (not case.get("same")) for rank in range(heads[0].ranks)]
    for head in heads:
        head.weight, head.bias = heads[0].weight, heads[0].bias
        hidden = head.hidden[head.own_tokens(rank)].clone().requires_grad_("hidden" not in case.get("frozen", ()))
        with torch.set_grad_enabled(not case.get("no_grad")):
            loss = head.ring([hidden, *leaves[1:]])
        want_loss, want = head.expected(upstream)
        errors.append(relative(loss.detach(), want_loss))
        if not loss.requires_grad:
            assert case.get("no_grad") or len(case["frozen"]) == 3
            continue
        for _ in range(2 if case.get("twice") else 1):
            loss.backward(torch.tensor(upstream[rank], dtype=loss.dtype), retain_graph=bool(case.get("twice")))
        factor = 2 if case.get("twice") else 1
        want = [g if g is None else g * factor for g in want]
        if "hidden" not in case.get("frozen", ()):
            errors.append(relative(hidden.grad, want[0]))
        wanted = (
            want[1:] if wanted is None else [a if a is None else a + b for a, b in zip(wanted, want[1:], strict=True)]
        )
    for name, leaf, want in zip(("shard", "bias"), leaves[1:], wanted or (), strict=False):
        if leaf is not None and name in case.get("frozen", ()):
            assert leaf.grad is None
        elif leaf is not None:
            errors.append(relative(leaf.grad, want))
    if case.get("again"):
        errors += same_bits(heads[0])
    return errors


def same_bits(head):
    found = []
    for _ in range(2):
        leaves = head.leaves()
        loss = head.ring(leaves)
        loss.backward()
        found.append([loss.detach(), *(leaf.grad for leaf in leaves if leaf is not None and leaf.requires_grad)])
    return [0.0 if torch.equal(a, b) else float("inf") for a, b in zip(*found, strict=True)]


def half(case):
    """Over 5 seeds: sums of squared errors of this rank's dh and dW, ours and stock's in bfloat16, and how many."""
    found = {"ours": [0.0, 0.0], "stock": [0.0, 0.0]}
    for seed in range(5):
        head = Head(case, torch.bfloat16, seed)
        ones = [1.0] * head.ranks
        _, (dh, dw, _) = head_in_double(head).expected(ones)
        leaves = head.leaves()
        head.ring(leaves).backward()
        whole = [head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_(), None]
        sum(head.stock_losses(*whole)).backward()
        stock = whole[0].grad[head.own_tokens(head.rank)], whole[1].grad[head.own_entries(head.rank)]
        for name, grads in (("ours", [leaf.grad for leaf in leaves[:2]]), ("stock", stock)):
            for place, (got, want) in enumerate(zip(grads, (dh, dw), strict=True)):
                if got is not None:
                    found[name][place] += (got.double() - want).square().sum().item()
    return found


def head_in_double(head):
    same = Head(head.case)
    same.hidden, same.weight, same.labels = head.hidden.double(), head.weight.double(), head.labels
    return same


class Breaks:
    """Stands in for `Block.logits` until it breaks, after so many blocks of gradients, or of statistics."""

    def __init__(self, within, after):
        self.within, self.left, self.stock = within, after, fold_module.Block.logits

    def __enter__(self):
        fold_module.Block.logits = lambda *arguments: self(*arguments)

    def __exit__(self, *error):
        fold_module.Block.logits = self.stock

    def __call__(self, block, *arguments):
        self.left -= torch._C._current_graph_task_id() != -1 if self.within == "backward" else 1
        if self.left < 0:
            raise ArithmeticError("the product has broken")
        return self.stock(block, *arguments)


def fails(case):
    """What each rank says where rank 1 is given something else, or breaks; on a group of its own, which it ends."""
    group = distributed.new_group(list(range(distributed.get_world_size())))
    head, odd = Head(case), case.get("odd", {}) if distributed.get_rank() == 1 else {}
    more = {**case.get("all", {}), **odd}
    if "transform" in more:
        more["transform"] = LogitTransform(**more["transform"])
    if "label" in more:
        head.labels[head.own_tokens(1).start + 2] = more.pop("label")
    head.hidden = head.hidden.to(getattr(torch, more.pop("dtype", "float64")))
    head.bias = torch.zeros(len(head.weight), dtype=torch.float64) if more.pop("bias", False) else None
    head.case = {**case, "frozen": more.pop("frozen", [])}
    leaves, said = head.leaves(), None
    breaks = case.get("breaks") if distributed.get_rank() == 1 else None
    with Breaks(breaks, case.get("after", 0)) if breaks else torch.enable_grad():
        try:
            head.ring(leaves, wire=GroupWire(group), **more).backward(create_graph=case.get("create_graph", False))
        except (ValueError, RuntimeError, ArithmeticError) as error:
            said = f"{type(error).__name__}: {error}"
    return said


KINDS = {"exact": exact, "half": half, "fails": fails}


if __name__ == "__main__":
    main(lambda case: KINDS[case["kind"]](case))
