"""What a model does to its logits between the projection and the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["LogitTransform"]


@dataclass(frozen=True)
class LogitTransform:
    """
    z = softcap · tanh(scale · x / softcap), or z = scale · x without a soft cap, in float32 at least.

    Arguments:
        scale (`float`, defaults to 1.0):
            Factor of the projected logits. A model that divides (Granite's `logits_scaling`) has 1 / divisor here.
        softcap (`float`, *optional*):
            Bound of the logits' magnitude (Gemma's `final_logit_softcapping`).
    """

    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError(f"scale={self.scale!r} must be finite; 1.0 leaves the logits as they are.")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap={self.softcap!r} must be positive and finite, or None for no soft cap.")

    def forward_(self, logits: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        """Transforms `logits` in place; with a soft cap, `kept` (same shape) receives tanh(scale · x / softcap)."""
        if self.softcap is None:
            return logits.mul_(self.scale) if self.scale != 1.0 else logits
        logits.mul_(self.scale / self.softcap).tanh_()
        if kept is not None:
            kept.copy_(logits)
        return logits.mul_(self.softcap)

    def backward_(self, gradient: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        """
        Carries d/dz over to d/dx in place, all but the factor `scale`: times 1 - tanh². Consumes `kept`.

        `scale` is left to the caller, who can fold it into a factor that each row has anyway.
        """
        if self.softcap is None:
            return gradient
        return gradient.mul_(kept.square_().neg_().add_(1.0))
