"""Which dtype sums are taken in. Every schedule follows this one rule."""

from __future__ import annotations

import torch

__all__ = ["accumulation_dtype"]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, statistics and gradients until their one final cast: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
