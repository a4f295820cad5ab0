"""The attention of a fake step: what a fused kernel keeps and returns, and never a matrix of S x S."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

__all__ = ["plan_attention", "plan_mask"]


def plan_mask(
    batch_size: int, q_length: int, kv_length: int, config: PreTrainedConfig | None = None, **kwargs
) -> torch.Tensor | None:
    """
    None: the kernel masks by itself. Only an indexer, which picks keys by their scores, reads a mask of its own.

    Returns:
        `[B, 1, S, S]`, or `None`.
    """
    if not any(name.startswith(("index_", "indexer_")) for name in vars(config or object)):
        return None
    return torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool)


def plan_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    As torch's fused kernel, which is called where it can be; else (attention sinks, values of another width than keys)
    a stand-in with the memory of one and without its values.

    Arguments:
        query: `[B, heads, S, d]`; key: `[B, kv heads, S, d]`; value: `[B, kv heads, S, v]`.
        s_aux: sinks `[heads]`.

    Returns:
        `[B, S, heads, v]`, and no weights.
    """
    if s_aux is None and query.shape[-1] == value.shape[-1] and kwargs.get("position_bias") is None:
        plain = {name: value for name, value in kwargs.items() if name not in ("is_causal", "softcap")}
        return sdpa_attention_forward(module, query, key, value, None, is_causal=True, **plain)
    return _Fused.apply(query, key, value, s_aux), None


class _Fused(torch.autograd.Function):
    """Keeps its inputs, its output and the log-sum-exp of each query's scores."""

    @staticmethod
    def forward(ctx, query, key, value, sinks):
        batch, heads, length, _ = query.shape
        out = query.new_zeros(batch, length, heads, value.shape[-1])
        lse = query.new_zeros(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.sinks = None if sinks is None else sinks.detach()
        return out

    @staticmethod
    def backward(ctx, _):
        query, key, value, _, _ = ctx.saved_tensors
        sinks = None if ctx.sinks is None else torch.zeros_like(ctx.sinks)
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), sinks
