"""Bytes to rows: how many tokens' logits fit in a budget. The schedule, a planner and validation share it."""

from __future__ import annotations

import torch

from hf_longmoe.schedules.numerics import accumulation_dtype
from hf_longmoe.sizes import TooSmall, format_bytes, parse_bytes

__all__ = ["SMALLEST_TILE", "beside_bytes", "tile_bytes", "tile_rows"]

# Below this a tile is all overhead: every tile passes over the weight and its gradient once more.
SMALLEST_TILE = 8
_PER_ROW = 128  # maximum, sum, log-sum-exp, target logit, label, position ... of one token
_PER_TOKEN = 16  # shifted label, position among the valid ones, loss


def tile_bytes(
    rows: int,
    vocab_size: int,
    hidden_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    keep_logits: bool = False,
    bias: bool = False,
) -> int:
    """
    Bytes that one tile of `rows` tokens holds, beside hidden states, weight and their gradients.

    With `a` the bytes of the accumulation dtype and `b` those of `dtype`, a row holds V·a of logits, which become
    probabilities and then the gradient in place; V·a more if the logits must outlive the softmax; V·b more if `dtype`
    is a half precision (the gradient as it enters the products, or the upcast operands where the device has no
    product that takes halves and returns float32); H·(b + 2a) of hidden states and their gradient, gathered, upcast.

    Arguments:
        rows: tokens in the tile.
        vocab_size: V, the rows of the weight.
        hidden_size: H, the columns of the weight.
        dtype: what enters the matrix products: the autocast dtype under autocast, else the weight's.
        keep_logits: a soft cap, or statistics, need the logits beside the probabilities.
        bias: the head has a bias (its gradient needs one more row of V).
    """
    half = dtype.itemsize < 4
    wide = accumulation_dtype(dtype).itemsize
    logit = wide * (2 if keep_logits else 1) + (dtype.itemsize if half else 0)
    row = vocab_size * logit + hidden_size * (dtype.itemsize + 2 * wide) + _PER_ROW
    return rows * row + (vocab_size * wide if bias else 0)


def beside_bytes(
    tokens: int,
    vocab_size: int,
    hidden_size: int,
    *,
    hidden: torch.dtype = torch.float32,
    weight: torch.dtype = torch.float32,
    dtype: torch.dtype | None = None,
    tied: bool = False,
) -> int:
    """
    Bytes that a training call holds at most beside its budget and its gradients in the accumulation dtype.

    16 a token; and the largest of: in forward, under autocast, weight and bias cast to `dtype`; in backward, in half
    precision, the gradient of the hidden states and then that of the weight, rounded beside what it is rounded from
    (which is then dropped). The weight's counts only if it is tied: else it is the parameter's gradient from birth.

    Arguments:
        tokens: T, all tokens of the call.
        hidden, weight: dtypes of the hidden states [T, H] and of the weight [V, H].
        dtype: what enters the matrix products; the weight's if not given.
        tied: whether another use adds to the weight's gradient.
    """
    dtype, wide = dtype or weight, accumulation_dtype(weight)
    cast = vocab_size * (hidden_size + 1) * dtype.itemsize if dtype != weight else 0
    dh = tokens * hidden_size * hidden.itemsize if hidden != wide else 0
    dw = vocab_size * hidden_size * weight.itemsize if tied and weight != wide else 0
    return _PER_TOKEN * tokens + max(cast, dh, dw)


def tile_rows(
    budget: int | str,
    vocab_size: int,
    hidden_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    keep_logits: bool = False,
    bias: bool = False,
) -> int:
    """
    The most rows, a multiple of 8, whose [`tile_bytes`] fit in `budget`. It does not depend on the number of tokens.

    Arguments:
        budget: bytes, as an integer or as `"64MiB"`. The others as in [`tile_bytes`].

    Raises:
        `ValueError`: not even a tile of 8 rows fits; the message says what would.

    ```py
    >>> from hf_longmoe.schedules.vocab import tile_rows
    >>> tile_rows("64MiB", 32_768, 512)
    488

    ```
    """
    given = parse_bytes(budget, "vocab.budget")

    def needs(rows: int) -> int:
        return tile_bytes(rows, vocab_size, hidden_size, dtype=dtype, keep_logits=keep_logits, bias=bias)

    fixed = needs(0)
    rows = (given - fixed) // (needs(1) - fixed)
    if rows < SMALLEST_TILE:
        least = needs(SMALLEST_TILE)
        raise TooSmall(
            f"vocab.budget={given} ({format_bytes(given)}) is too small: a tile of {SMALLEST_TILE} rows of "
            f"{vocab_size} logits of {str(dtype).removeprefix('torch.')} needs {least} bytes; "
            f'"{-(-least // 2**20)}MiB" would work.'
        )
    return rows - rows % 8
