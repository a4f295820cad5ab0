"""Per-token numbers that trainers log, from logits that exist only inside a tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["TokenStatistics"]


@dataclass(frozen=True)
class TokenStatistics:
    """
    Detached, of the labels' shape, zero (`False`) at ignored tokens; of the transformed logits, as the loss sees them.

    Arguments:
        log_probs: log-probability of the label, without label smoothing or z-loss; float32 (float64 for float64).
        entropy: entropy of the predicted distribution, in nats; same dtype.
        correct: whether the label has the largest logit; bool.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    correct: torch.Tensor

    @classmethod
    def zeros(cls, tokens: int, dtype: torch.dtype, device: torch.device) -> TokenStatistics:
        floats = torch.zeros(2, tokens, dtype=dtype, device=device)
        return cls(floats[0], floats[1], torch.zeros(tokens, dtype=torch.bool, device=device))

    def reshape(self, shape: torch.Size) -> TokenStatistics:
        return TokenStatistics(self.log_probs.view(shape), self.entropy.view(shape), self.correct.view(shape))
