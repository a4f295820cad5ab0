"""Bytes to rows under expert parallelism: what one budget buys of rows in flight, of a tile and of lent experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_longmoe.schedules.dispatch.blocks import Block
from hf_longmoe.schedules.dispatch.exchange import ExchangeCaps
from hf_longmoe.schedules.dispatch.plan import MIN_ROWS
from hf_longmoe.schedules.numerics import accumulation_dtype
from hf_longmoe.sizes import TooSmall

__all__ = ["PipelineSizes", "pipeline_sizes"]

_LENT = 4  # experts' weights and gradients in flight on a rank: a few pay, each one more pays less ...
_SHARE = 8  # ... but where many small experts fill a large wave, what this part of the budget holds
_WORTH = 256  # rows that are always worth an expert's way there and back
_OPEN = 2  # half precision: experts whose float32 gradients are being summed


@dataclass(frozen=True)
class PipelineSizes:
    """
    Arguments:
        caps: of the plan.
        tile: rows that are computed together, at most.
        span: how many consecutive experts a tile may span; `None` for any number.
        token_block: tokens whose output is accumulated at once; `None` for all.
        max_open: experts whose gradients are summed in a buffer of their own at once; `None` where they need none.
        bound: bytes that the block never passes beside its input, output, parameters and all their gradients (row
            indices and routing weights aside: at most 24 bytes a row).
    """

    caps: ExchangeCaps
    tile: int
    span: int | None
    token_block: int | None
    max_open: int | None
    bound: int


def pipeline_sizes(
    budget: int,
    hidden: int,
    dtype: torch.dtype,
    block: Block,
    params: Sequence[torch.Tensor],
    ranks: int,
    *,
    depth: int = 1,
    imbalance: float = 1.3,
) -> PipelineSizes:
    """
    Divides `budget` bytes.

    With b the bytes of an element of the parameters, a those of `accumulation_dtype` and d the depth, a row of a wave
    takes, in backward, (2d + 1)·(2H·b + a) on its way to the experts (d waves sent and being received, one received)
    and 3·(H·b + a) on its way back, and H·a/4 while it is added up: about 9·H·b at depth 1. A row of a tile takes
    `block.bytes_per_row`. Lent experts get what four experts' weights and gradients take, up to half of the budget, or
    an eighth of it where that holds more; never more than the other ranks have. Where the output is accumulated in
    another dtype than its own, a half of all goes to that.

    Arguments:
        budget: bytes beside the block's input, output, parameters and all their gradients.
        hidden: H.
        dtype: of the block's input.
        block: how a tile's experts run.
        params: the rank's own experts; gradients are those of the ones that train (of all, if none does).
        ranks: of the group.
        depth: waves that are sent ahead of the one being computed.
        imbalance: experts are lent where the largest load of a rank is at least this many times the mean.

    Raises:
        `TooSmall` (a `ValueError`): the budget is below a wave of a few rows.
    """
    size, total = params[0].element_size(), accumulation_dtype(dtype)
    half = dtype != total
    out = (2 * depth + 1) * (2 * hidden * size + total.itemsize)
    wire = out + 3 * (hidden * size + total.itemsize) + hidden * total.itemsize // 4
    compute = block.bytes_per_row(hidden, params)
    span = block.max_experts(params, budget // 2 if half else budget)
    stacked = [param for param, own in zip(params, block.stacked, strict=True) if own]
    elements = sum(param[0].numel() for param in stacked)
    trained = sum(param[0].numel() for param in stacked if param.requires_grad) or elements
    weight_bytes, gradient_bytes = elements * size, trained * accumulation_dtype(params[0].dtype).itemsize

    free = budget // 2 if half else budget
    if span is not None:  # the model's own kernel: the gradients of a tile's experts, as a temporary
        free -= free // 4
    least = max(ranks, MIN_ROWS)
    # While a wave is sent, that to be computed next still has its send buffer, in the place of a tile.
    smallest = least * wire + max(MIN_ROWS * compute, least * hidden * size)
    unit = weight_bytes + gradient_bytes
    others = (ranks - 1) * params[0].shape[0]
    foreign = min(free // 2, max(_LENT * unit, free // _SHARE), others * unit)
    if foreign < unit or free - foreign < smallest or imbalance > ranks:  # no load is ever that uneven
        foreign = 0
    free -= foreign
    if free < smallest:
        needed = smallest * (2 if half else 1)
        needed = -(-needed * 4 // 3) + 4 if span is not None else needed
        raise TooSmall(
            f"dispatch.budget={budget} bytes is below one wave of {least} rows on {ranks} ranks; a row takes"
            f" {wire + compute} bytes here, so give at least {needed}."
        )
    # As many as are computed at once; where computing one takes more, half of the bytes, so that waves stay few.
    rows = max(free // (wire + compute), min(max(free // 2 // wire, least), (free - MIN_ROWS * compute) // wire))
    tile = min(rows, (free - rows * wire) // compute)
    caps = ExchangeCaps(
        rows=rows,
        foreign=foreign,
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        imbalance=imbalance,
        min_rows=max(1, min(rows // 16, _WORTH)),
        depth=depth,
    )
    max_open = _OPEN if params[0].dtype != accumulation_dtype(params[0].dtype) else None
    token_block = max(1, budget // 2 // (hidden * total.itemsize)) if half else None
    beside = (max_open or 0) * gradient_bytes + block.beside_rows(params, budget // 2 if half else budget)
    return PipelineSizes(caps, tile, span, token_block, max_open, budget + beside)
