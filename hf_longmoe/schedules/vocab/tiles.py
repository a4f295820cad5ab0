"""
Vocabulary projection and loss on one rank: tiles of tokens against the whole vocabulary, gradients in forward.

[`linear_cross_entropy`] is `cross_entropy(transform(linear(hidden, weight, bias)), labels)` at 6·T·V·H operations and
the memory of one tile. [`token_log_probs`] is for losses that weigh tokens by what is not known yet: it recomputes the
logits in backward, at 8·T·V·H operations. [`token_statistics`] gives entropy and accuracy with them.
"""

from __future__ import annotations

import torch

from hf_longmoe.schedules.vocab.checks import (
    check_num_items,
    check_objective,
    check_vocab_size,
    flatten_low_rank,
    flatten_tokens,
)
from hf_longmoe.schedules.vocab.head import operand_dtype
from hf_longmoe.schedules.vocab.labels import select_valid
from hf_longmoe.schedules.vocab.log_probs import LogProbs, TokenPlan
from hf_longmoe.schedules.vocab.logits import LogitTransform
from hf_longmoe.schedules.vocab.loss import Loss, LossPlan
from hf_longmoe.schedules.vocab.rows import tile_rows
from hf_longmoe.schedules.vocab.statistics import TokenStatistics

__all__ = ["linear_cross_entropy", "token_log_probs", "token_statistics"]

_NO_TRANSFORM = LogitTransform()
_FIELDS = ("entropy", "correct", "mean_logits", "log_sum_squares")
# One clean graph break: the number of valid labels decides the tiles, and the buffers are written in place.
_eager = torch.compiler.disable(reason="the vocabulary schedule reads the number of valid labels")


@_eager
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    budget: int | str,
    ignore_index: int = -100,
    num_items: int | float | torch.Tensor | None = None,
    transform: LogitTransform = _NO_TRANSFORM,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    statistics: bool = False,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, TokenStatistics]:
    """
    Cross-entropy of the language-model head, exact, with a peak that does not grow with the number of tokens.

    With z the transformed logits of a token and lse their log-sum-exp, its loss is
    (1 - label_smoothing) · (lse - z[label]) + label_smoothing · (lse - mean(z)) + z_loss · lse²
    (smoothing as in `torch.nn.functional.cross_entropy`; z-loss as in PaLM, https://arxiv.org/abs/2204.02311).

    Arguments:
        hidden (`torch.Tensor`): [..., H].
        weight (`torch.Tensor`): [V, H].
        labels (`torch.Tensor`): [...], integers, already shifted: the target of each hidden state.
        bias (`torch.Tensor`, *optional*): [V].
        budget (`int` or `str`): bytes of logits, and of everything computed from them, alive at once.
        ignore_index (`int`, defaults to -100): label of tokens to leave out; they are dropped before the products.
        num_items (`int`, `float` or `torch.Tensor`, *optional*):
            What the sum over tokens is divided by; the number of valid tokens if not given.
        transform ([`LogitTransform`]): scale and soft cap of the logits.
        label_smoothing (`float`, defaults to 0.0): share of the target spread evenly over the vocabulary.
        z_loss (`float`, defaults to 0.0): coefficient of the squared log-sum-exp.
        statistics (`bool`, defaults to `False`): also return per-token statistics.
        low_rank (`tuple` of two `torch.Tensor`, *optional*):
            u [..., r] and v [V, r], of which u · vᵀ is added to the projection (LoRA on the head: u = scale · x · Aᵀ
            and v = B), in the dtype of the logits.
        vocab_size (`int`, *optional*): where the rest of the V entries are padding, how many come before it.

    Returns:
        The loss, a scalar of float32 (float64 for float64 operands); with `statistics`, `(loss, TokenStatistics)`.
        If no token is valid the loss is zero, and so are the gradients (`cross_entropy` gives NaN).

    Raises:
        `ValueError`: shapes or dtypes that do not fit, a label outside the vocabulary, or a budget below one tile.
        `RuntimeError`: in backward, with `create_graph=True`.
    """
    hidden, labels, shape = flatten_tokens(hidden, weight, labels, bias)
    check_objective(label_smoothing, z_loss)
    check_num_items(num_items)
    u, v = (None, None) if low_rank is None else flatten_low_rank(hidden, weight, *low_rank)
    rank = 0 if v is None else v.shape[1]
    vocab_size = check_vocab_size(vocab_size, weight)
    tiling = _tiling(hidden, weight[:vocab_size], bias, budget, transform, statistics, rank)
    plan = LossPlan(
        **tiling,
        valid=select_valid(labels, ignore_index, vocab_size),
        vocab_size=vocab_size,
        num_items=num_items,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    collected = [] if statistics else None
    loss = Loss.apply(hidden, weight, bias, u, v, plan, torch.is_grad_enabled(), collected)
    return loss if collected is None else (loss, collected[0].reshape(shape))


@_eager
def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    budget: int | str,
    transform: LogitTransform = _NO_TRANSFORM,
    ignore_index: int = -100,
) -> torch.Tensor:
    """
    Differentiable log-probability of each label.

    Arguments: as in [`linear_cross_entropy`].

    Returns:
        [...], float32 (float64 for float64 operands); zero, with zero gradient, at ignored tokens. Hidden states and
        weight are kept for backward, and 4 bytes a token; logits are not.

    Raises:
        As [`linear_cross_entropy`].
    """
    options = dict(bias=bias, budget=budget, transform=transform, ignore_index=ignore_index)
    return _statistics(hidden, weight, labels, (), "token_log_probs", **options).log_probs


@_eager
def token_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    fields: tuple[str, ...] = ("entropy", "correct"),
    bias: torch.Tensor | None = None,
    budget: int | str,
    transform: LogitTransform = _NO_TRANSFORM,
    ignore_index: int = -100,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> TokenStatistics:
    """
    Differentiable log-probability of each label, and what trainers log beside it.

    Arguments:
        fields (`tuple[str, ...]`, defaults to `("entropy", "correct")`):
            The optional fields of [`TokenStatistics`] to compute. The entropy can be differentiated too; a backward
            that reaches it takes tiles of half as many tokens.
        The others: as in [`linear_cross_entropy`]. For a temperature, divide the transform's scale and soft cap by it.

    Returns:
        [`TokenStatistics`] of the labels' shape. Kept for backward are hidden states and weight, and 4 bytes a token
        (8 with the entropy); logits are not.

    Raises:
        As [`linear_cross_entropy`]; `ValueError` for an unknown field, and in a backward that reaches the entropy, for
            a budget below a tile of that.
    """
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        raise ValueError(f"fields={fields!r} has {unknown[0]!r}; choose among {', '.join(_FIELDS)}.")
    options = dict(bias=bias, budget=budget, transform=transform, ignore_index=ignore_index, low_rank=low_rank)
    return _statistics(hidden, weight, labels, tuple(fields), "token_statistics", **options)


def _statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    fields: tuple[str, ...],
    name: str,
    *,
    bias: torch.Tensor | None,
    budget: int | str,
    transform: LogitTransform,
    ignore_index: int,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> TokenStatistics:
    hidden, labels, shape = flatten_tokens(hidden, weight, labels, bias)
    u, v = (None, None) if low_rank is None else flatten_low_rank(hidden, weight, *low_rank)
    vocab_size, hidden_size = weight.shape
    hidden_size += 0 if v is None else v.shape[1]
    tiling = _tiling(hidden, weight, bias, budget, transform, False, hidden_size - weight.shape[1])
    valid = select_valid(labels, ignore_index, weight.shape[0])
    shapes = dict(dtype=tiling["dtype"], keep_logits=True, bias=bias is not None)

    def entropy_rows() -> int:
        return max(1, min(tile_rows(budget, vocab_size, hidden_size, **shapes), hidden.shape[0]))

    plan = TokenPlan(**tiling, valid=valid, fields=fields, entropy_rows=entropy_rows, name=name)
    return TokenStatistics(*LogProbs.apply(hidden, weight, bias, u, v, plan)).reshape(shape)


def _tiling(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    budget: int | str,
    transform: LogitTransform,
    statistics: bool,
    rank: int = 0,
) -> dict:
    keep_logits = statistics or transform.softcap is not None
    dtype = operand_dtype(hidden, weight, bias)
    vocab_size, hidden_size = weight.shape
    hidden_size += rank  # a token's u takes no more than so many hidden states
    rows = tile_rows(budget, vocab_size, hidden_size, dtype=dtype, keep_logits=keep_logits, bias=bias is not None)
    rows = max(1, min(rows, hidden.shape[0]))
    return {"dtype": dtype, "rows": rows, "keep_logits": keep_logits, "transform": transform}
