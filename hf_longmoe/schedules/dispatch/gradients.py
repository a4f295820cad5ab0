"""Weight gradients of experts whose rows arrive wave by wave, written in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_longmoe.schedules.dispatch.plan import Segment
from hf_longmoe.schedules.numerics import accumulation_dtype

__all__ = ["WeightGradients"]


class WeightGradients:
    """
    The gradients of one block's parameters, in the parameters' dtype; `None` for a parameter that wants none.

    A stacked parameter is `[E, ...]`, or shorter where the last experts have no rows. An expert whose rows all lie in
    one wave gets its gradient by one product, rounded once. One that spans several is summed in `accumulation_dtype`:
    in place where that is the parameter's own dtype, else in a buffer of that one expert, cast when its last rows have
    come. An expert without rows gets zeros.
    A parameter that is not stacked (a norm all experts share) is summed over the waves.

    Arguments:
        params: the parameters; only shapes, dtypes and devices are used.
        wanted: for each, whether it needs a gradient.
        stacked: for each, whether its first dimension is the experts.
        counts: rows of each expert.
        max_open: how many experts may have such a buffer at once. The one opened first is then rounded into the
            gradient before its last rows have come, and goes on from there.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        stacked: Sequence[bool],
        counts: Sequence[int],
        max_open: int | None = None,
    ) -> None:
        self.stacked, self.max_open = stacked, max_open
        self.grads: list[torch.Tensor | None] = [None] * len(params)
        self._open: dict[tuple[int, int], torch.Tensor] = {}
        for i, (param, want) in enumerate(zip(params, wanted, strict=True)):
            if want and stacked[i]:
                self.grads[i] = torch.empty_like(param)
                for expert, count in enumerate(counts[: len(param)]):
                    if not count:
                        self.grads[i][expert].zero_()
            elif want:
                self.grads[i] = torch.zeros_like(param, dtype=accumulation_dtype(param.dtype))

    @classmethod
    def into(cls, grads: Sequence[torch.Tensor | None]) -> WeightGradients:
        """Into stacked tensors that are there already, in the dtype that sums are taken in."""
        gradients = cls((), (), [True] * len(grads), ())
        gradients.grads = list(grads)
        return gradients

    def finish(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients; to be called once, after the last wave."""
        return [g if g is None else g.to(p.dtype) for g, p in zip(self.grads, params, strict=True)]

    def add_product(self, index: int, segment: Segment, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds `left.T @ right` (a segment's rows, `[rows, a]` and `[rows, b]`) to stacked `index`, `[E, a, b]`."""
        grad = self.grads[index]
        if grad is None:
            return
        out = grad[segment.expert]
        in_place = out.dtype == accumulation_dtype(out.dtype)
        if out.dtype == left.dtype and (in_place or segment.first and segment.last):
            if segment.first:
                torch.mm(left.T, right, out=out)
            else:
                out.addmm_(left.T, right)
            return
        total = out if in_place else self._buffer(index, segment, out)
        if in_place and segment.first:
            total.zero_()
        if left.is_cuda:
            torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
        else:  # no product of half-precision operands with a float32 result here: cast a few rows at a time
            for a, b in zip(left.split(512), right.split(512), strict=True):
                total.addmm_(a.T.to(total.dtype), b.to(total.dtype))
        if not in_place:
            self._close(index, segment, out)

    def add(self, index: int, segment: Segment, value: torch.Tensor) -> None:
        """Adds a finished `value`, of one expert's shape, to stacked `index`."""
        grad = self.grads[index]
        if grad is None:
            return
        out = grad[segment.expert]
        if segment.first and segment.last:
            out.copy_(value)
        elif out.dtype == accumulation_dtype(out.dtype):
            out.copy_(value) if segment.first else out.add_(value)
        else:
            self._buffer(index, segment, out).add_(value)
            self._close(index, segment, out)

    def _buffer(self, index: int, segment: Segment, out: torch.Tensor) -> torch.Tensor:
        key = index, segment.expert
        if key not in self._open:
            self._round_oldest(segment.expert)
            total = accumulation_dtype(out.dtype)
            self._open[key] = torch.zeros_like(out, dtype=total) if segment.first else out.to(total)
        return self._open[key]

    def _round_oldest(self, expert: int) -> None:
        others = list(dict.fromkeys(e for _, e in self._open if e != expert))
        if self.max_open is None or len(others) < self.max_open:
            return
        for key in [key for key in self._open if key[1] == others[0]]:
            self.grads[key[0]][key[1]].copy_(self._open.pop(key))

    def _close(self, index: int, segment: Segment, out: torch.Tensor) -> None:
        if segment.last:
            out.copy_(self._open.pop((index, segment.expert)))
