"""Experts that are lent for some waves: what they hold on their helper and on their home. Integers only.

capacity  = the mean     every rank computes as many rows; the most experts are lent
          = the largest  nothing is lent, nothing is held
search: the lowest capacity at which no rank ever holds more foreign bytes than it may
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isqrt

import numpy as np

from hf_longmoe.schedules.dispatch.placement import Placement, place

__all__ = ["ForeignBytes", "placements"]

_STEPS = 5  # of the search: the ratio of largest load and mean, to the power of 1 / 32, is what it can miss


@dataclass(frozen=True)
class ForeignBytes:
    """
    What one lent expert holds. Used by its helper from wave `first` to `last`:

        helper  weights    first - depth .. last           home  weights   first - depth .. first     (send buffer)
                gradients  first .. last + 1                     gradients last .. last + 1           (receive buffer)

    Experts that come to a helper together share a buffer, which lives until the last of them is done; so do gradients
    that go home together, from when the first of them begins.

    Arguments:
        weights, gradients: bytes of one expert.
        depth: weights are fetched so many waves ahead.
    """

    weights: int
    gradients: int
    depth: int

    def peak(self, placed: Placement, first: np.ndarray, last: np.ndarray, waves: int) -> int:
        """Bytes on the worst rank in the worst wave; `first`, `last`: of each lent segment of `placed`."""
        if not len(first):
            return 0
        helper, home = placed.destination[placed.foreign], placed.home
        ahead, after = np.maximum(first - self.depth, 0), last + 2
        come, go = helper * waves + first, helper * waves + last
        kept, begun = np.zeros((2, len(placed.load) * waves), dtype=np.int64)
        np.maximum.at(kept, come, last)
        begun += waves
        np.minimum.at(begun, go, first)
        ranks = np.concatenate([helper, helper, home, home])
        start = np.concatenate([ahead, begun[go], ahead, last])
        stop = np.concatenate([kept[come] + 1, after, first + 1, after])
        size = np.repeat([self.weights, self.gradients] * 2, len(first))
        at = ranks * (waves + 2) + np.stack([start, stop])
        change = np.bincount(at.reshape(-1), np.concatenate([size, -size]), len(placed.load) * (waves + 2))
        return int(change.reshape(-1, waves + 2).cumsum(1).max())


def placements(
    rows: np.ndarray,
    ranks: int,
    cap: int,
    foreign: ForeignBytes,
    waves: Callable[[Placement], int],
    *,
    imbalance: float = 1.0,
    min_rows: int = 1,
) -> Iterator[Placement]:
    """
    Placements to try, the most even first. The last holds the cap whatever the waves are.

    The first is judged by waves that are equal ranges, which the plan prefers but may not be able to have.

    Arguments:
        rows: int64 [E], rows of each expert.
        ranks: P.
        cap: bytes that a rank may hold.
        foreign: what a lent expert holds.
        waves: the number of waves that a placement needs at least.
        imbalance: lend only where the largest native load is at least so many times the mean.
        min_rows: a lent range carries at least so many rows.
    """
    native = rows.reshape(ranks, -1).sum(1)
    most, total = int(native.max()), int(native.sum())
    each = foreign.weights + foreign.gradients

    def holds_by_ranges(placed: Placement) -> bool:
        least = waves(placed)
        return all(foreign.peak(placed, *placed.range_waves(w), w) <= cap for w in (least, least + 1))

    def holds_always(placed: Placement) -> bool:
        return placed.most_foreign * each <= cap

    if cap < each or most * ranks < imbalance * total:
        yield place(rows, ranks, most)
        return
    even = place(rows, ranks, -(-total // ranks), min_rows)
    for holds in (holds_by_ranges, holds_always):
        best, low, high = even, -(-total // ranks), most
        if not holds(even):
            best = place(rows, ranks, most)
            for _ in range(_STEPS):
                middle = isqrt(low * high)
                if middle == low:
                    break
                placed = place(rows, ranks, middle, min_rows)
                if holds(placed):
                    best, high = placed, middle
                else:
                    low = middle
        yield best
        if holds_always(best):
            return
