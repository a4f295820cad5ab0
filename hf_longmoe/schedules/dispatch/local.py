"""The one-rank schedule: expert-major waves under a byte budget, exact.

The rows ((token, slot) pairs) of a block are sorted by expert and taken in consecutive waves, so that the matrix
products stay large and each expert's weight gradient is computed once. Nothing between the waves is kept: backward
recomputes a wave's hidden layer just before using it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hf_longmoe.schedules.dispatch.blocks import Block, row_slices
from hf_longmoe.schedules.dispatch.gradients import WeightGradients
from hf_longmoe.schedules.dispatch.layout import rows_by
from hf_longmoe.schedules.dispatch.plan import Wave, plan_waves, rows, shown_waves
from hf_longmoe.schedules.nodes import save_and_run
from hf_longmoe.schedules.numerics import accumulation_dtype
from hf_longmoe.schedules.rehearsal import each, rehearsing

__all__ = ["LocalDispatch", "count_rows"]


def count_rows(keys: torch.Tensor, bins: int) -> list[int]:
    """
    How many times each of `0 .. bins - 1` stands in `keys` (any shape, integers); larger keys are left out.

    The schedule's only step that depends on data, and its only host synchronisation: a fake step replaces it.
    """
    return torch.bincount(keys.reshape(-1), minlength=bins).tolist()[:bins]


@dataclass(frozen=True)
class LocalDispatch:
    """
    Runs a block's experts in waves: `schedule(x, top_k_index, top_k_weights, block, params)`.

    Arguments:
        budget: bytes beside the block's input, output, parameters and all their gradients (row indices and routing
            weights aside: at most 24 bytes a row). In half precision half of it goes to the float32 output of a block
            of tokens, and one expert's float32 weight gradients come on top when its rows span several waves.
        output_saved_after: whether something after the experts, in the same checkpointed layer, saves a tensor that
            depends on their output. `False` lets a replay skip the experts; if untrue, gradients become NaN.
        count_rows: see `count_rows`.
    """

    budget: int
    output_saved_after: bool = True
    count_rows: Callable[[torch.Tensor, int], list[int]] = count_rows

    def __call__(
        self,
        x: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        block: Block,
        params: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """
        Arguments:
            x: `[T, H]`.
            top_k_index: experts of each token, `[T, k]` integers; an index of E or more is no expert's.
            top_k_weights: routing weights, `[T, k]`.
            block: how a wave's experts run.
            params: the block's parameters, stacked ones first dimension E.

        Returns:
            `[T, H]`, in the dtype of `x`: the sum over slots of weight times output, summed in at least float32.

        Raises:
            `ValueError`: the budget is below one wave of a few rows.
        """
        call = _Call(self, block, self.rows(x, block, params))
        return save_and_run(call, x, top_k_weights, top_k_index, *params)

    def rows(self, x: torch.Tensor, block: Block, params: Sequence[torch.Tensor]) -> int:
        """Rows of a wave at most; raises as `__call__` does."""
        return rows(self.budget, block.bytes_per_row(x.shape[-1], params), share=2 if _halved(x) else 1)

    def _accumulator(self, x: torch.Tensor) -> int:
        return self.budget // 2 if _halved(x) else 0

    def token_block(self, x: torch.Tensor) -> int:
        """Tokens whose output is accumulated at once: all, where the output's own dtype is what it accumulates in."""
        if not self._accumulator(x):
            return max(x.shape[0], 1)
        return max(1, self._accumulator(x) // (x.shape[1] * accumulation_dtype(x.dtype).itemsize))


def _halved(x: torch.Tensor) -> bool:
    """Whether half of the budget is for outputs that are summed in another dtype than their own."""
    return x.dtype != accumulation_dtype(x.dtype)


class _Call:
    """
    One call of one layer (see `schedules.nodes`); `counts` pin its routing.

    Rows sorted by expert are made anew in backward: what is kept here lives until then.
    """

    def __init__(self, schedule: LocalDispatch, block: Block, limit: int) -> None:
        self.schedule, self.block, self.limit = schedule, block, limit
        self.output_saved_after = schedule.output_saved_after
        self.counts: list[int] = []  # rows of each expert
        # Within each block of tokens, until the end of forward: [T * k] int32, rows sorted by expert, ties by row.
        self.block_order: torch.Tensor | None = None
        self.block_counts: list[list[int]] = []

    def waves(self, counts: list[int], params: Sequence[torch.Tensor]) -> list[Wave]:
        waves = plan_waves(counts, self.limit, self.block.max_experts(params, self.schedule.budget))
        return waves if rehearsing() is None else shown_waves(waves)

    def prepare(self, x: torch.Tensor, w: torch.Tensor, index: torch.Tensor, *params: torch.Tensor) -> None:
        ids, experts, size = index.reshape(-1).to(torch.int32), params[0].shape[0], self.schedule.token_block(x)
        blocks = max(1, -(-x.shape[0] // size))
        if blocks == 1:
            self.block_counts, self.block_order = [self.schedule.count_rows(ids, experts)], _by_expert(index)
        else:  # one sort and one synchronisation for all blocks; one more bin a block takes what is no expert's
            block = torch.arange(len(ids), device=x.device, dtype=torch.int32) // (size * index.shape[-1])
            key = block * (experts + 1) + ids.clamp(max=experts)
            flat = self.schedule.count_rows(key, blocks * (experts + 1))
            self.block_counts = [flat[b * (experts + 1) : (b + 1) * (experts + 1) - 1] for b in range(blocks)]
            self.block_order = rows_by(key)
        self.counts = [sum(counts) for counts in zip(*self.block_counts, strict=True)]

    def forward(self, x: torch.Tensor, w: torch.Tensor, index: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        total, size, k = accumulation_dtype(x.dtype), self.schedule.token_block(x), index.shape[-1]
        out = torch.zeros_like(x)
        for b, counts in each(enumerate(self.block_counts), kind=lambda block: tuple(block[1])):
            first = b * size * k
            x_block, part = x[b * size : (b + 1) * size], out[b * size : (b + 1) * size]
            w_block = w.reshape(-1)[first : first + size * k]
            sums = part if total == x.dtype else torch.zeros_like(part, dtype=total)
            for wave in self.waves(counts, params):
                at = self.block_order[first + wave.start : first + wave.stop] - first
                token = at // k
                y = self.block.forward(_gather(x_block, token, params), wave, params)
                weight = w_block.index_select(0, at).to(total)
                for s in row_slices(*y.shape):
                    sums.index_add_(0, token[s], y[s].to(total).mul(weight[s, None]))
            if sums is not part:
                part.copy_(sums)
        self.block_order = None
        return out

    def backward(self, g: torch.Tensor, needs: Sequence[bool], x: torch.Tensor, w: torch.Tensor, index, *params):
        total, k, order = accumulation_dtype(x.dtype), index.shape[-1], _by_expert(index)
        grads = WeightGradients(params, needs[3:], self.block.stacked, self.counts)
        # Half precision: float32 while it fits, else the model's dtype, in which stock kernels add a token's slots.
        wide = x.shape[0] <= self.schedule.token_block(x)
        grad_x = torch.zeros_like(x, dtype=total if wide else x.dtype) if needs[0] else None
        grad_w = torch.zeros(w.numel(), dtype=total, device=w.device) if needs[1] else None
        flat = w.reshape(-1)
        for wave in self.waves(self.counts, params):
            at = order[wave.start : wave.stop]
            token = at // k
            rows_x, rows_g = _gather(x, token, params), _gather(g, token, params)
            rows_x, rows_w = self.block.backward(rows_x, rows_g, flat.index_select(0, at), wave, params, grads)
            del rows_g
            if grad_w is not None:
                grad_w.index_copy_(0, at.long(), rows_w.to(total))
            if grad_x is not None:
                for s in row_slices(*rows_x.shape):
                    grad_x.index_add_(0, token[s], rows_x[s].to(grad_x.dtype))
            del rows_x
        return (
            None if grad_x is None else grad_x.to(x.dtype),
            None if grad_w is None else grad_w.view_as(w).to(w.dtype),
            None,
            *grads.finish(params),
        )


def _by_expert(index: torch.Tensor) -> torch.Tensor:
    """`[T, k]` -> `[T * k]` int32: rows by expert, ties by row; an index that is no expert's comes last."""
    return rows_by(index.reshape(-1).to(torch.int32))


def _gather(x: torch.Tensor, token: torch.Tensor, params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows in the parameters' dtype, which is what the stock kernels multiply in."""
    return x.index_select(0, token).to(params[0].dtype)
