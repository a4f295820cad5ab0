"""Per-token numbers that trainers log, from logits that exist only inside a tile."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

__all__ = ["TokenStatistics"]


@dataclass(frozen=True)
class TokenStatistics:
    """
    Of the labels' shape, zero (`False`) at ignored tokens; of the transformed logits, as the loss sees them.

    With z the logits of a token and p = softmax(z). [`token_statistics`] gives log-probabilities and entropy that can
    be differentiated; those of [`linear_cross_entropy`] are detached. `None` is what was not asked for.

    Arguments:
        log_probs: log-probability of the label, without label smoothing or z-loss; float32 (float64 for float64).
        entropy: entropy of the predicted distribution, in nats; same dtype.
        correct: whether the label has the largest logit; bool.
        mean_logits: mean of z over the vocabulary; same dtype as `log_probs`.
        log_sum_squares: log Σ p², same dtype.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    correct: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    log_sum_squares: torch.Tensor | None = None

    @classmethod
    def zeros(cls, tokens: int, dtype: torch.dtype, device: torch.device) -> TokenStatistics:
        floats = torch.zeros(2, tokens, dtype=dtype, device=device)
        return cls(floats[0], floats[1], torch.zeros(tokens, dtype=torch.bool, device=device))

    def reshape(self, shape: torch.Size) -> TokenStatistics:
        values = (getattr(self, field.name) for field in fields(self))
        return TokenStatistics(*(None if value is None else value.view(shape) for value in values))
