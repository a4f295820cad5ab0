"""What travels round the ring, how far, and in tiles of what size. Integers only, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_longmoe.schedules.numerics import accumulation_dtype
from hf_longmoe.schedules.vocab.rows import SMALLEST_TILE
from hf_longmoe.sizes import TooSmall, format_bytes, parse_bytes

__all__ = ["TRAVELS", "RingPlan", "choose_travel", "ring_beside_bytes", "ring_bytes", "ring_tile"]

TRAVELS = ("auto", "tokens", "weights")
_PER_ITEM = 128  # labels, statistics and positions of one token of a tile, twice


@dataclass(frozen=True)
class RingPlan:
    """
    Arguments:
        tokens: valid tokens of each rank.
        entries: vocabulary entries of each rank.
        travel: `"tokens"`, `"weights"`, or `"sums"` where all ranks have the same tokens.
        tile: how many of what travels, and of what stays, are in a block.
    """

    tokens: tuple[int, ...]
    entries: tuple[int, ...]
    travel: str
    tile: int

    @property
    def vocab_size(self) -> int:
        return sum(self.entries)

    def offset(self, rank: int) -> int:
        """The first vocabulary entry of a rank."""
        return sum(self.entries[:rank])

    @property
    def tiles(self) -> int:
        """How many times something goes round the ring, or is summed, in one direction of a pass."""
        most = max(self.entries if self.travel == "weights" else self.tokens)
        return -(-most // self.tile)

    def part(self, rank: int, tile: int) -> slice:
        """Which of a rank's tokens, or entries, are in a tile that travels; perhaps none."""
        own = self.entries[rank] if self.travel == "weights" else self.tokens[rank]
        return slice(min(tile * self.tile, own), min((tile + 1) * self.tile, own))


def ring_bytes(
    travel: str,
    moving: int,
    hidden_size: int,
    ranks: int,
    itemsize: int,
    wide: int,
    *,
    backward: bool = True,
    returns: bool = True,
    frozen: bool = False,
) -> int:
    """
    Bytes that a rank sends in a step if each has `moving` items that travel; that all send, if they have so many.

    Forward: H·b·(P - 1) an item. Backward: as much once more, and its gradient, H·a·P. Of a frozen head, whose only
    gradient is that of the hidden states, everything is computed in forward: tokens travel with their gradient, and
    with the label's row of the weight, H·(a + b)·P; weights alone, and once more for the labels' rows.
    Aside: of each token that travels a label, 8 bytes, as often as its hidden states, and 3·a of statistics, P times
    in forward and P - 1 times in backward; of each vocabulary entry b and a of a bias; and H·a·(P - 1) a rank where
    label smoothing meets a frozen head.

    Arguments:
        travel: `"tokens"` or `"weights"`.
        itemsize, wide: b, bytes of an element of hidden states and weight; a, of sums.
        backward: whether there are gradients at all.
        returns: whether what travels gathers one.
        frozen: whether one pass is enough, see `ring_frozen.py`.
    """
    once = moving * hidden_size * itemsize * (ranks - 1)
    if not backward:
        return once
    if frozen:
        return once + moving * hidden_size * (wide + itemsize) * ranks if travel == "tokens" else 2 * once
    return 2 * once + (moving * hidden_size * wide * ranks if returns else 0)


def ring_tile(budget: int | str, hidden_size: int, *, dtype: torch.dtype, keep_logits: bool) -> int:
    """
    The largest n, a multiple of 8, of which n travel and n stay in a block whose bytes fit in the budget.

    With b the bytes of `dtype` and a those of sums, a block holds n·n of logits, a bytes each, twice with
    `keep_logits`, and b more in a half precision (see `tile_bytes`); n·H·b five times: two tiles of what travels, one
    of what stays, two of labels' rows; n·H·a five times: three gradients of what travels, and what stays, or its
    gradient, gathered and upcast.

    Raises:
        `ValueError`: not even a block of 8 by 8 fits.
    """
    given = parse_bytes(budget, "vocab.budget")
    wide = accumulation_dtype(dtype).itemsize
    square = wide * (2 if keep_logits else 1) + (dtype.itemsize if dtype.itemsize < 4 else 0)
    line = hidden_size * 5 * (dtype.itemsize + wide) + 2 * _PER_ITEM

    def needs(n: int) -> int:
        return n * n * square + n * line

    if needs(SMALLEST_TILE) > given:
        raise TooSmall(
            f"vocab.budget={given} ({format_bytes(given)}) is too small: a block of {SMALLEST_TILE} tokens by"
            f" {SMALLEST_TILE} vocabulary entries needs {needs(SMALLEST_TILE)} bytes;"
            f' "{-(-needs(SMALLEST_TILE) // 2**10)}KiB" would work.'
        )
    n = (math.isqrt(line * line + 4 * square * given) - line) // (2 * square)
    return n - n % SMALLEST_TILE


def ring_beside_bytes(tokens: int, entries: int, hidden_size: int, *, hidden: torch.dtype, weight: torch.dtype) -> int:
    """
    Bytes that a training call holds at most beside its budget and its gradients in their own dtypes.

    With a the bytes of sums: 3·a + 16 a token (statistics, shifted label, position); and in half precision, until the
    gradients are rounded, the larger ones that they are rounded from.

    Arguments:
        tokens, entries: T, this rank's tokens; v, its part of the vocabulary.
        hidden, weight: dtypes of the hidden states [T, H] and of the weight [v, H].
    """
    wide = accumulation_dtype(weight)
    dh = tokens * hidden_size * wide.itemsize if hidden != wide else 0
    dw = entries * (hidden_size + 1) * (wide.itemsize - weight.itemsize)
    return (3 * wide.itemsize + 16) * tokens + dh + dw


def choose_travel(tokens: int, entries: int, ranks: int, dtype: torch.dtype, needs: Sequence[bool], one: bool) -> str:
    """
    What sends fewer bytes, `ring_bytes` of each way.

    Arguments:
        tokens, entries: of all ranks.
        dtype: what enters the products.
        needs: whether hidden states, weight and bias need a gradient.
        one: whether one pass is enough.
    """
    sizes = (1, ranks, dtype.itemsize, accumulation_dtype(dtype).itemsize)
    by_tokens, by_weights = (
        ring_bytes(travel, moving, *sizes, backward=any(needs), returns=returns, frozen=one)
        for travel, moving, returns in (("tokens", tokens, needs[0]), ("weights", entries, needs[1]))
    )
    return "tokens" if by_tokens < by_weights else "weights"
