"""
The three matrix products of the head: operands in the model's dtype, results in float32 at least.

Every product of a tile goes through one of these classes, so that forward and backward logits take the same path:

| operands          | device | how                                                                                   |
|-------------------|--------|---------------------------------------------------------------------------------------|
| float32, float64  | any    | as they are                                                                           |
| bfloat16, float16 | CUDA   | `torch.mm(..., out_dtype=torch.float32)`: the result is never rounded to half          |
| bfloat16, float16 | others | operands upcast, the weight a strip at a time: the same numbers, and on a CPU without  |
|                   |        | half-precision units many times faster than its half-precision product                |
"""

from __future__ import annotations

import math

import torch

from hf_longmoe.schedules.numerics import accumulation_dtype
from hf_longmoe.schedules.rehearsal import each

__all__ = ["HalfOnCuda", "HalfUpcast", "SameDtype", "choose_products"]


class SameDtype:
    """Operands that are float32 or float64 already."""

    # Power of two by which gradients of the logits are multiplied before the products, see `HalfOnCuda`.
    unit = 1.0

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [r, H] as they enter the products of this tile."""
        return hidden

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The logits' gradient [r, V] as it enters the products of this tile."""
        return gradient

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """`out` [r, V] = hidden · weightᵀ."""
        torch.mm(hidden, weight.t(), out=out)

    def dh(self, gradient: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, first: bool = True) -> None:
        """`out` [r, H] = gradient · weight; unless `first`: += instead."""
        if first:
            torch.mm(gradient, weight, out=out)
        else:
            out.addmm_(gradient, weight)

    def dw(self, gradient: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor, first: bool) -> None:
        """`out` [V, H] += gradientᵀ · hidden; `first`: = instead, so that `out` needs no zeros."""
        if first:
            torch.mm(gradient.t(), hidden, out=out)
        else:
            out.addmm_(gradient.t(), hidden)


class HalfUpcast(SameDtype):
    """
    Half-precision operands, upcast. No precision is lost: the product of two halves fits in a float32.

    Arguments:
        strip: buffer for the rows of the weight upcast at once [s, H], float32.
    """

    def __init__(self, strip: torch.Tensor) -> None:
        self.strip = strip

    def _strips(self, weight: torch.Tensor):
        step = self.strip.shape[0]
        steps = each(range(0, weight.shape[0], step), kind=lambda start: min(step, weight.shape[0] - start))
        for start in steps:
            rows = weight[start : start + step]
            yield slice(start, start + step), self.strip[: rows.shape[0]].copy_(rows)

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float()

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        for columns, strip in self._strips(weight):
            torch.mm(hidden, strip.t(), out=out[:, columns])

    def dh(self, gradient: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, first: bool = True) -> None:
        for columns, strip in self._strips(weight):
            if first and columns.start == 0:
                torch.mm(gradient[:, columns], strip, out=out)
            else:
                out.addmm_(gradient[:, columns], strip)


class HalfOnCuda(SameDtype):
    """
    Half-precision operands on a device whose products accumulate, and can return, float32.

    The gradient is rounded once, to enter the products. A float16 one is first multiplied by `unit`: its entries are
    probabilities, of which those below 6e-8 would vanish, and no loss scale has reached them yet.

    Arguments:
        cast: buffer for the rounded gradient [rows, V].
        scale: the logit scale, which bounds the gradient's entries together with 1 + 2 · z_loss · log-sum-exp.
    """

    def __init__(self, cast: torch.Tensor, scale: float = 1.0) -> None:
        self.cast = cast
        if cast.dtype == torch.float16:
            self.unit = 2.0 ** (10 - math.frexp(scale)[1])

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.cast[: gradient.shape[0], : gradient.shape[1]].copy_(gradient)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)

    def dh(self, gradient: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, first: bool = True) -> None:
        if first:
            torch.mm(gradient, weight, out_dtype=out.dtype, out=out)
        else:
            torch.addmm(out, gradient, weight, out_dtype=out.dtype, out=out)

    def dw(self, gradient: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor, first: bool) -> None:
        if first:
            torch.mm(gradient.t(), hidden, out_dtype=out.dtype, out=out)
        else:
            torch.addmm(out, gradient.t(), hidden, out_dtype=out.dtype, out=out)


def choose_products(rows: int, weight: torch.Tensor, scale: float = 1.0) -> SameDtype:
    """
    Arguments:
        rows: tokens in a tile.
        weight: [V, H], in the dtype that enters the products.
        scale: the logit scale.
    """
    if weight.dtype == accumulation_dtype(weight.dtype):
        return SameDtype()
    vocab_size, hidden_size = weight.shape
    if weight.device.type == "cuda":
        return HalfOnCuda(weight.new_empty(rows, vocab_size), scale)
    # As many bytes as the rounded gradient takes on CUDA: one budget for both.
    strip = min(vocab_size, max(1, rows * vocab_size * weight.dtype.itemsize // (4 * hidden_size)))
    return HalfUpcast(weight.new_empty(strip, hidden_size, dtype=torch.float32))
