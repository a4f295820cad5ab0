"""Which dtype sums are taken in, and which one autocast computes in. Every schedule follows these rules."""

from __future__ import annotations

import torch

__all__ = ["accumulation_dtype", "autocast_dtype"]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, statistics and gradients until their one final cast: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts to on `device`, here and now; `None` where it is off, or the device (`meta`) has none."""
    kind = device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    return torch.get_autocast_dtype(kind)
