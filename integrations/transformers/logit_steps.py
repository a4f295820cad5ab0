"""Which operations a model may apply to its logits before the loss without forming them, and what they amount to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from hf_longmoe.schedules.vocab import LogitTransform

__all__ = ["CASTS", "CLONES", "IN_PLACE", "SHAPE_ONLY", "Steps", "cast_target", "kept_entries"]


@dataclass(frozen=True)
class Steps:
    """The operations applied so far: factors, then perhaps a tanh and the soft cap it is multiplied by."""

    scale: float = 1.0
    tanh: bool = False
    softcap: float | None = None
    applied: tuple[tuple[Callable, tuple, dict], ...] = field(default=())

    def then(self, func: Callable, operands: tuple, options: dict) -> Steps | None:
        """With one more operation (a slice: see `kept_entries`); `None` where a `LogitTransform` cannot express it."""
        done = replace(self, applied=(*self.applied, (func, operands, options)))
        if func in CASTS or func is torch.Tensor.__getitem__:
            return done
        if func in _TANH and not self.tanh:
            return replace(done, tanh=True)
        if len(operands) == 1 and not options and isinstance(operands[0], (int, float)) and operands[0] != 0:
            factor = float(operands[0])
            if self.tanh:
                # z = factor * tanh(scale * x), which is a soft cap of `factor` on scale * factor * x
                capped = func in _MULTIPLIES and self.softcap is None and factor > 0
                return replace(done, softcap=factor, scale=self.scale * factor) if capped else None
            if func in _MULTIPLIES:
                return replace(done, scale=self.scale * factor)
            if func in _DIVIDES:
                return replace(done, scale=self.scale / factor)
        return None

    @property
    def cut(self) -> bool:
        """Whether only the first entries of the vocabulary were kept."""
        return any(func is torch.Tensor.__getitem__ for func, _, _ in self.applied)

    @property
    def transform(self) -> LogitTransform | None:
        """`None` for a tanh whose soft cap has not been multiplied back."""
        return None if self.tanh and self.softcap is None else LogitTransform(self.scale, self.softcap)


def kept_entries(shape: tuple[int, ...], func: Callable, operands: tuple, options: dict) -> int | None:
    """How many entries of the vocabulary, the first ones, a slice of logits of this shape keeps; `None` if no such."""
    if func is not torch.Tensor.__getitem__ or len(operands) != 1 or options or not isinstance(operands[0], tuple):
        return None
    *before, last = operands[0]
    whole = before in ([Ellipsis], [slice(None)] * (len(shape) - 1))
    if not whole or not isinstance(last, slice) or last.start not in (None, 0) or last.step not in (None, 1):
        return None
    return last.stop if isinstance(last.stop, int) and 0 < last.stop <= shape[-1] else None


def _methods(*names: str) -> frozenset[Callable]:
    """Functions of `torch` and methods of its tensors by these names; not every name is both."""
    spaces = (torch.Tensor, torch)
    return frozenset(getattr(space, name) for space in spaces for name in names if hasattr(space, name))


IN_PLACE = _methods("mul_", "multiply_", "__imul__", "div_", "divide_", "true_divide_", "__itruediv__", "tanh_")
_TANH = _methods("tanh", "tanh_")
CLONES = _methods("clone")
_MULTIPLIES = _methods("mul", "multiply", "__mul__", "__rmul__", "mul_", "multiply_", "__imul__")
_DIVIDES = _methods("div", "divide", "true_divide", "__truediv__", "div_", "divide_", "true_divide_", "__itruediv__")
CASTS = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.half: torch.float16,
    torch.Tensor.to: None,  # it depends on the arguments
}
SHAPE_ONLY = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        *("shape", "dtype", "device", "requires_grad", "grad_fn", "layout", "ndim", "grad", "is_leaf", "_base"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "itemsize", "nbytes"),
    )
) | _methods("size", "dim", "numel", "is_floating_point", "stride", "__len__", "element_size", "nelement")


def cast_target(logits: torch.Tensor, func: Callable, operands: tuple, options: dict) -> torch.dtype | None:
    """The floating-point dtype that a cast leads to; `None` for whatever else `Tensor.to` can do."""
    if func is not torch.Tensor.to:
        return CASTS[func]
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*operands, **options)
    except TypeError:  # `other=`, `copy=`
        return None
    dtype = dtype or logits.dtype
    moved = device is not None and device != logits.device
    return None if moved or memory_format is not None or not dtype.is_floating_point else dtype
