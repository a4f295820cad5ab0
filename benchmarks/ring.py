"""
The LM head divided over ranks: Ring-DTP against a rank that has the whole weight.

Baselines, without their communication: `torch.nn.functional.linear`, an upcast to float32 and `cross_entropy`, which
is what Transformers' loss does, or our tiles on one rank. Each has the whole weight and its whole gradient, which a
data parallel run would gather and reduce; neither is counted in its peak. All ranks have the same tokens, so that the
gradient before that reduction is the mean after it, which ours gives.

Peaks are the worst rank's, wall seconds the slowest's, CPU seconds all ranks'.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed

from benchmarks.case import Case, Growth, Problem
from hf_longmoe.schedules.vocab import linear_cross_entropy, ring_cross_entropy, ring_tile
from hf_longmoe.schedules.wire import GroupWire
from hf_longmoe.sizes import parse_bytes

__all__ = ["THREADS", "RingSizes", "cases"]

THREADS = 1
_REFERENCE_TOKENS = 1024  # of the float64 step at a time; its sums do not depend on it at this precision
_STATISTICS = 16  # bytes a token, beside the budget


@dataclass(frozen=True, kw_only=True)
class RingSizes:
    """
    Arguments:
        ranks, tokens, hidden, vocab (`int`): P, N of each rank, H, V of all ranks.
        budget (`str`): of our schedule, and of the tiles.
        travel (`str`, defaults to `"auto"`): see `ring_cross_entropy`.
        dtype (`torch.dtype`, defaults to `torch.float32`): of hidden states and weight.
        frozen (`bool`, defaults to `False`): the weight wants no gradient.
        backward (`bool`, defaults to `True`): forward and backward, or forward alone.
        tiles (`bool`, defaults to `False`): the baseline is our tiles on one rank.
        in_turn (`bool`, defaults to `False`): the baseline's ranks take turns, where memory is too short for all.
    """

    ranks: int
    tokens: int
    hidden: int
    vocab: int
    budget: str
    travel: str = "auto"
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    backward: bool = True
    tiles: bool = False
    in_turn: bool = False

    def label(self) -> str:
        more = {
            str(self.dtype).removeprefix("torch."): self.dtype != torch.float32,
            f"{self.travel} travel": self.travel != "auto",
            "frozen head": self.frozen,
            "forward alone": not self.backward,
            "against one-rank tiles": self.tiles,
        }
        sizes = f"{self.ranks} ranks, N {self.tokens}, H {self.hidden}, V {self.vocab}, {self.budget}"
        return ", ".join([sizes, *(name for name, said in more.items() if said)])

    def build(self) -> Problem:
        torch.manual_seed(0)
        hidden = torch.randn(self.tokens, self.hidden).to(self.dtype).requires_grad_()
        weight = torch.randn(self.vocab, self.hidden).mul_(self.hidden**-0.5).to(self.dtype)
        labels = torch.randint(self.vocab, (self.tokens,))
        rank, each = distributed.get_rank(), -(-self.vocab // self.ranks)
        own = slice(rank * each, (rank + 1) * each)
        shard = weight[own].clone().requires_grad_(not self.frozen)
        wire = GroupWire(distributed.group.WORLD)

        def baseline() -> torch.Tensor:
            states = _InTurn.apply(hidden) if self.in_turn else hidden
            whole = _Gathered.apply(shard, weight, own)
            if self.tiles:
                return linear_cross_entropy(states, whole, labels, budget=self.budget)
            return F.cross_entropy(F.linear(states, whole).float(), labels)

        def ours() -> torch.Tensor:
            options = {"travel": self.travel, "weight_scale": 1 / self.ranks}
            return ring_cross_entropy(hidden, shard, labels, wire=wire, budget=self.budget, **options)

        def details() -> dict[str, Any]:
            budget = parse_bytes(self.budget, "budget")
            return {
                "budget_bytes": budget,
                "bound_bytes": budget + _STATISTICS * self.tokens,
                "block": ring_tile(self.budget, self.hidden, dtype=self.dtype, keep_logits=False),
                "sent_bytes": wire.sent_bytes,  # of the one step there has been
            }

        def reference() -> list[torch.Tensor]:
            return self._in_float64(hidden, weight, labels, own)

        given = [hidden, shard, labels, weight]
        return Problem(given, torch.ones(()), baseline, ours, reference, backward=self.backward, details=details)

    def _in_float64(
        self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, own: slice
    ) -> list[torch.Tensor]:
        """Each rank computes its part of the tokens, which are the same on all."""
        hidden = hidden.detach().double().requires_grad_()
        weight = weight.double().requires_grad_(not self.frozen)
        total, hidden.grad = torch.zeros((), dtype=torch.float64), torch.zeros_like(hidden)
        for start in range(0, self.tokens, _REFERENCE_TOKENS):
            if start // _REFERENCE_TOKENS % self.ranks == distributed.get_rank():
                part = slice(start, start + _REFERENCE_TOKENS)
                with torch.set_grad_enabled(self.backward):
                    logits = F.linear(hidden[part], weight)
                    loss = F.cross_entropy(logits, labels[part], reduction="sum") / self.tokens
                if self.backward:
                    loss.backward()
                total += loss.detach()
        found = [total]
        if self.backward:
            found.append(hidden.grad)
        if self.backward and not self.frozen:
            found.append(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        for tensor in found:
            distributed.all_reduce(tensor)
        return [*found[:2], *(gradient[own].clone() for gradient in found[2:])]


class _Gathered(torch.autograd.Function):
    """The whole weight, as if gathered from the shards; of its whole gradient the shard's part goes back."""

    @staticmethod
    def forward(ctx, shard, weight, own):
        ctx.own = own
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[ctx.own], None, None


class _InTurn(torch.autograd.Function):
    """A rank's forward waits for the backward of the rank before it."""

    @staticmethod
    def forward(ctx, hidden):
        rank = distributed.get_rank()
        if rank:
            distributed.recv(torch.zeros(1), src=rank - 1)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        rank = distributed.get_rank()
        if rank + 1 < distributed.get_world_size():
            distributed.send(torch.zeros(1), dst=rank + 1)
        return gradient


def cases(quick: bool) -> list[Case]:
    """The cases; `quick`: the same at a fraction of the size, without limits but the bound."""
    sizes = RingSizes(ranks=2, tokens=2048, hidden=512, vocab=32_768, budget="32MiB")
    if quick:
        sizes = RingSizes(ranks=2, tokens=256, hidden=32, vocab=1024, budget="256KiB")
    found = list(_cases(sizes))
    if not quick:
        return found
    return [replace(case, limits=_BOUND if "beside_peak_bytes" in case.limits else {}, gate=False) for case in found]


_BOUND = {"beside_peak_bytes": "bound_bytes"}


def _cases(sizes: RingSizes) -> Iterator[Case]:
    yield _case(sizes, limits={"wall_ratio": 1.35, **_BOUND}, gate=True)
    yield _case(replace(sizes, backward=False), limits={"wall_ratio": 1.05, **_BOUND}, gate=True)
    yield _case(replace(sizes, frozen=True), limits={"wall_ratio": 1.0, **_BOUND}, gate=True)
    yield _case(replace(sizes, tiles=True), limits=_BOUND)
    yield _case(replace(sizes, travel="weights"), limits=_BOUND)
    # A CPU without half-precision units takes minutes for the full size of this baseline.
    half = replace(sizes, tokens=sizes.tokens // 8, vocab=sizes.vocab // 8, dtype=torch.bfloat16)
    yield _case(half)
    yield _case(replace(half, frozen=True))
    for ranks in (2, 4):
        few = replace(sizes, ranks=ranks)
        if ranks != sizes.ranks:
            yield _case(few, limits=_BOUND, gate=True, timed=False)
        for factor in (4, 8):
            many = replace(few, tokens=factor * few.tokens, in_turn=True)
            saved = {"peak_saved": 0.97} if (ranks, factor) == (4, 8) else {}
            growth = _growth(few, "token", many.tokens - few.tokens, bytes_per_unit=_STATISTICS)
            yield _case(many, limits={**saved, **_BOUND}, gate=True, timed=False, grows_from=growth)
        wide = replace(few, vocab=2 * few.vocab)
        growth = _growth(few, "vocabulary entry", wide.vocab - few.vocab, bytes_per_unit=0)
        yield _case(wide, limits=_BOUND, gate=True, timed=False, grows_from=growth)


def _growth(few: RingSizes, unit: str, units: int, bytes_per_unit: int) -> Growth:
    return Growth(case=few.label(), unit=unit, units=units, bytes_per_unit=bytes_per_unit, slack=0.02)


def _case(sizes: RingSizes, **values: Any) -> Case:
    return Case(name=sizes.label(), sizes=sizes, ranks=sizes.ranks, **values)
