"""
The routers' load-balancing loss from per-layer sums: [E] numbers a layer instead of all layers' probabilities.

Equations (4) to (6) of Switch Transformers (https://arxiv.org/abs/2101.03961), over the rows of all layers together:

    loss = E · Σ_e (Σ_l counts_l[e] / rows) · (Σ_l probabilities_l[e] / rows)

where only the probabilities carry a gradient. A layer's sums need one pass over blocks of its router logits, and so
does their gradient, which recomputes each block's softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_longmoe.schedules.numerics import accumulation_dtype

__all__ = ["RouterSums", "load_balancing_loss", "router_sums"]


@dataclass(frozen=True)
class RouterSums:
    """
    One layer's share of the loss.

    Arguments:
        probabilities: [E], sum of the routing probabilities over the tokens, weighted by the mask; differentiable.
        counts: [E], number of tokens, weighted by the mask, that have the expert among their top k.
        rows: number of tokens, or the mask's sum (a scalar tensor).
    """

    probabilities: torch.Tensor
    counts: torch.Tensor
    rows: int | torch.Tensor


def router_sums(
    logits: torch.Tensor, top_k: int, mask: torch.Tensor | None = None, *, block_bytes: int = 4 << 20
) -> RouterSums:
    """
    Arguments:
        logits (`torch.Tensor`): [T, E], router logits. The softmax is taken in their dtype, as the router does.
        top_k (`int`): experts a token.
        mask (`torch.Tensor`, *optional*): [T], or any shape of T elements: weights of the tokens, 0 for padding.
        block_bytes (`int`, defaults to 4 MiB): bytes of probabilities and their top k alive at once.

    Returns:
        Sums in float32 (float64 for float64 logits). For the gradient, `logits` and `mask` are kept, nothing else.

    Raises:
        `ValueError`: shapes that do not fit.
        `RuntimeError`: in backward, with `create_graph=True`.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; give [T, E].")
    tokens, experts = logits.shape
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k={top_k!r} must be between 1 and the number of experts, {experts}.")
    wide = accumulation_dtype(logits.dtype)
    if mask is not None:
        if mask.numel() != tokens:
            raise ValueError(f"mask has {mask.numel()} elements for {tokens} tokens; give one a token.")
        mask = mask.detach().reshape(-1).to(device=logits.device, dtype=wide)
    # Probabilities twice (their own dtype, then wide and weighted), and value, index and weight of each top k.
    row = experts * (logits.dtype.itemsize + 2 * wide.itemsize) + top_k * (logits.dtype.itemsize + 8 + wide.itemsize)
    probabilities, counts = _RouterSums.apply(logits, mask, top_k, max(1, block_bytes // row), wide)
    return RouterSums(probabilities, counts, tokens if mask is None else mask.sum())


def load_balancing_loss(sums: Sequence[RouterSums], num_experts: int) -> torch.Tensor:
    """
    Arguments:
        sums (sequence of [`RouterSums`]): one a layer.
        num_experts (`int`): E.

    Returns:
        The loss, a scalar: Transformers' `load_balancing_loss_func` of the layers' router logits. Zero where that
        gives NaN: if the mask leaves no token.

    Raises:
        `ValueError`: no layers, or layers of another number of experts.
    """
    if not sums:
        raise ValueError("sums is empty: give the RouterSums of at least one layer.")
    device = sums[0].probabilities.device
    for layer in sums:
        if layer.probabilities.shape != (num_experts,):
            raise ValueError(f"num_experts={num_experts}, but a layer has {layer.probabilities.numel()} experts.")
    counts = sum(layer.counts.to(device) for layer in sums)
    probabilities = sum(layer.probabilities.to(device) for layer in sums)
    rows = sum(layer.rows.to(device) if isinstance(layer.rows, torch.Tensor) else layer.rows for layer in sums)
    rows = torch.where(rows == 0, 1, rows) if isinstance(rows, torch.Tensor) else max(rows, 1)
    return num_experts * torch.sum((counts / rows) * (probabilities / rows))


class _RouterSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, mask, top_k: int, block: int, wide: torch.dtype):
        tokens, experts = logits.shape
        probabilities = logits.new_zeros(experts, dtype=wide)
        counts = torch.zeros_like(probabilities)
        ctx.softmax_dtype = None
        for start in range(0, tokens, block):
            routing = torch.softmax(logits[start : start + block], dim=-1)
            ctx.softmax_dtype = routing.dtype  # float32 under some autocasts: backward has to know
            chosen = torch.topk(routing, top_k, dim=-1).indices
            routing = routing.to(wide)
            if mask is None:
                weights = counts.new_ones(()).expand(chosen.shape)
            else:
                weights = mask[start : start + block].unsqueeze(1)
                routing = routing * weights
                weights = weights.expand(chosen.shape)
            probabilities += routing.sum(0)
            counts.scatter_add_(0, chosen.reshape(-1), weights.reshape(-1))
        ctx.block, ctx.wide = block, wide
        ctx.save_for_backward(logits, mask)
        ctx.mark_non_differentiable(counts)
        return probabilities, counts

    @staticmethod
    def backward(ctx, upstream, _):
        if torch.is_grad_enabled():
            raise RuntimeError("router_sums has no second derivative; call backward without create_graph=True.")
        logits, mask = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        with torch.autocast(logits.device.type, enabled=False):
            for start in range(0, logits.shape[0], ctx.block):
                stop = start + ctx.block
                routing = torch.softmax(logits[start:stop], dim=-1, dtype=ctx.softmax_dtype).to(ctx.wide)
                # d/dx Σ_e u_e p_e = p · (u - Σ_e u_e p_e): u is the same for all tokens, but for the mask's factor.
                mean = (routing @ upstream).unsqueeze(1)
                if mask is None:
                    routing.mul_(upstream - mean)
                else:
                    routing.mul_(upstream - mean).mul_(mask[start:stop].unsqueeze(1))
                gradient[start:stop] = routing
        return gradient, None, None, None, None
