"""The Transformers model that a wrapper (DDP, PEFT, `torch.compile`) holds."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

__all__ = ["causal_lm"]


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """
    The outermost `PreTrainedModel` of `model`, itself included.

    Raises:
        `ValueError`: there is none.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(f"model={type(model).__name__} holds no Transformers model; give a PreTrainedModel.")
