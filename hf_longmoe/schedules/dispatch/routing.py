"""
What a rank knows of one call's routing: the plan all ranks share, and where its own rows stand in it.

Integers only, since it lives from forward to backward. The rank's rows themselves, sorted by expert, are made anew
from its experts' ids in each pass (`Routing.orders`, `Routing.order`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_longmoe.schedules.dispatch.exchange import ExchangePlan, plan_exchange
from hf_longmoe.schedules.dispatch.layout import rows_by
from hf_longmoe.schedules.dispatch.sizes import PipelineSizes
from hf_longmoe.schedules.wire import Wire

__all__ = ["Routed", "Routing", "route"]


@dataclass(frozen=True)
class Routed:
    """
    The routing of a block of tokens.

    Arguments:
        plan: the same on every rank.
        tokens: which of the rank's tokens.
        first: where each expert's rows begin in the block's order.
        totals: rows of each expert, over all ranks.
        home: the rank's own experts.
        k: slots of a token.
    """

    plan: ExchangePlan
    tokens: slice
    first: Sequence[int]
    totals: Sequence[int]
    home: range
    k: int

    def rows(self, order: torch.Tensor, rank: int, wave: int) -> torch.Tensor:
        """The rank's rows of a wave, in the order in which it sends them: indices of (token, slot) pairs."""
        parts = [order[self.first[e] + a : self.first[e] + b] for e, a, b in self.plan.sends(rank, wave)]
        return torch.cat(parts) if parts else order[:0]


@dataclass(frozen=True)
class Routing:
    """
    Arguments:
        blocks: of tokens, one after the other: those of forward.
        whole: of all tokens: that of backward. The same as the block where there is one.
        size: tokens of a block.
    """

    blocks: Sequence[Routed]
    whole: Routed
    size: int

    def orders(self, index: torch.Tensor) -> list[torch.Tensor]:
        """
        `[rows]` int32 for each block: its (token, slot) pairs by expert, ties by pair; those of no expert come last.

        Arguments:
            index: `[T, k]`, global expert ids.
        """
        if len(self.blocks) == 1:
            return [self.order(index)]
        k, experts = index.shape[-1], len(self.whole.totals)
        order = rows_by(_block_key(_ids(index, experts), self.size * k, experts))
        starts = (block.tokens.start * k for block in self.blocks)
        stops = (block.tokens.stop * k for block in self.blocks)
        return [order[start:stop] - start for start, stop in zip(starts, stops, strict=True)]

    def order(self, index: torch.Tensor) -> torch.Tensor:
        """The same of all tokens at once."""
        return rows_by(_ids(index, len(self.whole.totals)))


def route(
    wire: Wire,
    sizes: PipelineSizes,
    index: torch.Tensor,
    x: torch.Tensor,
    params: Sequence[torch.Tensor],
    trains: bool,
) -> Routing:
    """
    Gathers every rank's counts and plans: one host synchronisation (two where the tokens of a rank are more than one
    block, which only half precision has).

    Arguments:
        index: `[T, k]`, global expert ids.
        x: `[T, H]`.
        params: the rank's own experts, stacked.
        trains: whether the experts need gradients.

    Raises:
        `ValueError`: the ranks do not agree on what they do; on every rank, before any row is sent.
    """
    experts, k = params[0].shape[0] * wire.size, index.shape[-1]
    size = sizes.token_block or max(x.shape[0], 1)
    terms = _terms(sizes, x, params, trains, experts, k)
    with wire.together():
        ids = _ids(index, experts)
        header = torch.tensor([*terms.values(), -(-x.shape[0] // size)], dtype=torch.int64)
        header = header.to(x.device, non_blocking=True)  # or the host would wait here too
        found = wire.gather(torch.cat([header, _count(ids, experts + 1)[:experts]]))
    _check_terms(list(terms), [row[: len(terms)] for row in found])
    blocks = max(1, *(row[len(terms)] for row in found))
    with wire.together():
        return _plan(wire, sizes, ids, [row[-experts:] for row in found], x.shape[0], k, size, blocks)


def _plan(
    wire: Wire,
    sizes: PipelineSizes,
    ids: torch.Tensor,
    counts: Sequence[Sequence[int]],
    count: int,
    k: int,
    size: int,
    blocks: int,
) -> Routing:
    experts = len(counts[0])
    local = experts // wire.size

    def routed(counts: Sequence[Sequence[int]], tokens: slice) -> Routed:
        mine, first = counts[wire.rank], [0]
        for count in mine:
            first.append(first[-1] + count)
        totals = [sum(column) for column in zip(*counts, strict=True)]
        home = range(wire.rank * local, (wire.rank + 1) * local)
        return Routed(plan_exchange(counts, sizes.caps), tokens, first, totals, home, k)

    whole = routed(counts, slice(0, count))
    if blocks == 1:
        return Routing([whole], whole, size)
    by_block = wire.gather(_count(_block_key(ids, size * k, experts), blocks * (experts + 1)))
    parts = []
    for b in range(blocks):
        counts = [row[b * (experts + 1) : (b + 1) * (experts + 1) - 1] for row in by_block]
        parts.append(routed(counts, slice(min(b * size, count), min((b + 1) * size, count))))
    return Routing(parts, whole, size)


def _ids(index: torch.Tensor, experts: int) -> torch.Tensor:
    """`[T, k]` -> `[T * k]` int32; an id that is no expert's becomes `experts`."""
    ids = index.reshape(-1).to(torch.int32)
    return torch.where((ids < 0) | (ids >= experts), experts, ids)


def _block_key(ids: torch.Tensor, rows: int, experts: int) -> torch.Tensor:
    """What sorts rows by block, and by expert within one; one more key a block takes what is no expert's."""
    return torch.arange(len(ids), device=ids.device, dtype=torch.int32) // rows * (experts + 1) + ids


def _count(ids: torch.Tensor, bins: int) -> torch.Tensor:
    """Not `bincount`, which waits for an accelerator to know its size."""
    one = torch.ones((), dtype=torch.int64, device=ids.device)
    return one.new_zeros(bins).scatter_add_(0, ids.to(torch.int64), one.expand(ids.shape))


def _terms(
    sizes: PipelineSizes, x: torch.Tensor, params: Sequence[torch.Tensor], trains: bool, experts: int, k: int
) -> dict[str, int]:
    caps = sizes.caps
    return {  # what others follow from comes first: the first difference is the one that is told
        "the hidden size": x.shape[1],
        "the number of experts": experts,
        "the slots of a token": k,
        "bits of the significand in the experts": _bits(params[0].dtype),
        "bits of the significand in the hidden states": _bits(x.dtype),
        "bytes of an expert's weights": caps.weight_bytes,
        "whether the experts need gradients": int(trains),
        "dispatch.overlap": caps.depth,
        "dispatch.imbalance (in millionths)": int(min(caps.imbalance, 1e6) * 1e6),
        "dispatch.budget (in rows of a wave)": caps.rows,
        "dispatch.budget (in bytes for lent experts)": caps.foreign,
        "dispatch.budget (in tokens of a block)": sizes.token_block or 0,
    }


def _bits(dtype: torch.dtype) -> int:
    """That tell dtypes apart by: those of its significand, 23 for float32, 10 for float16, 7 for bfloat16."""
    return -int(math.log2(torch.finfo(dtype).eps))


def _check_terms(names: Sequence[str], found: Sequence[Sequence[int]]) -> None:
    for name, values in zip(names, zip(*found, strict=True), strict=True):
        if len(set(values)) > 1:
            raise ValueError(
                f"The ranks of the expert group differ in {name}: {list(values)}. Load the same model and give the"
                " same config on every rank."
            )
