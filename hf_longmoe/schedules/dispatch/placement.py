"""Which destination computes which rows: least-loaded placement. Integers only.

An expert's rows, numbered 0 to its count, stay at its home up to some row; ranges from there to the end are lent to
ranks with room, each (expert, destination) at most once. Ranks with more rows than a capacity lend, others are lent
rows up to it: so the largest load never grows. Follows LLEP (arXiv 2601.17111), whose capacity is the mean; a higher
one lends fewer experts, which is how `lending.py` keeps to the bytes of foreign weights.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

__all__ = ["Placement", "place"]


@dataclass(frozen=True, eq=False)
class Placement:
    """
    n segments: rows `start` to `stop` of `expert`, computed at `destination`; none is empty. int64 arrays [n].

    They are sorted by destination, and then by the order in which the destination takes them.
    """

    expert: np.ndarray
    destination: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    foreign: np.ndarray
    """Indices of the segments that are lent, by (destination, expert)."""
    home: np.ndarray
    """The home of each lent segment, in the order of `foreign`."""
    load: np.ndarray
    """[P] rows per destination."""
    native: np.ndarray
    """[P] rows per destination if nothing were lent."""

    @property
    def most_foreign(self) -> int:
        """The most lent segments that one rank has to do with, as a helper and as a home together."""
        ranks = np.concatenate([self.home, self.destination[self.foreign]])
        return int(np.bincount(ranks, minlength=1).max())

    def range_waves(self, waves: int) -> tuple[np.ndarray, np.ndarray]:
        """First and last wave of each lent segment if every destination's order were cut into `waves` equal ranges."""
        at, size = self.foreign, self.stop - self.start
        start = (size.cumsum() - size)[at] - (self.load.cumsum() - self.load)[self.destination[at]]
        scale = waves / self.load[self.destination[at]]
        edges = np.ceil(np.stack([start + 1, start + size[at]]) * scale).astype(np.int64) - 1
        first, last = np.clip(edges, 0, waves - 1)
        return first, last


def place(rows: np.ndarray, ranks: int, capacity: int, min_rows: int = 1) -> Placement:
    """
    Arguments:
        rows: int64 [E], rows of each expert over all sources.
        ranks: P, which divides E; expert e lives on rank e // (E // P).
        capacity: rows above which a rank lends, and up to which it is lent; at least the mean.
        min_rows: a lent range carries at least so many rows.
    """
    local = len(rows) // ranks
    native = rows.reshape(ranks, local).sum(1)
    lent = np.array(_lend(rows, native, capacity, min_rows), dtype=np.int64).reshape(-1, 4)
    expert, destination, start, stop = lent.T

    kept, load = rows.copy(), native.copy()
    np.subtract.at(kept, expert, stop - start)
    np.subtract.at(load, expert // local, stop - start)
    np.add.at(load, destination, stop - start)

    own = np.flatnonzero(kept)
    columns = np.zeros((5, len(own) + len(lent)), dtype=np.int64)  # expert, stage, destination, start, stop
    columns[[0, 2, 3, 4], len(own) :] = lent.T
    columns[1, len(own) :] = 1
    columns[0, : len(own)], columns[2, : len(own)], columns[4, : len(own)] = own, own // local, kept[own]
    if len(lent):
        columns[1, : len(own)] = _stage(kept.reshape(ranks, local), destination).reshape(-1)[own]
        columns = columns[:, np.lexsort(columns[:3])]
    expert, _, destination, start, stop = columns
    foreign = np.flatnonzero(expert // local != destination)
    return Placement(expert, destination, start, stop, foreign, expert[foreign] // local, load, native)


def _lend(rows: np.ndarray, native: np.ndarray, capacity: int, min_rows: int) -> list[tuple[int, int, int, int]]:
    """
    (expert, destination, start, stop) of every lent range: largest experts first, each to the least-loaded rank.

    A range ends where its expert's excess or its helper's room does, so an expert never comes to a helper twice.
    """
    local = len(rows) // len(native)
    excess = (native - capacity).tolist()
    if max(excess) <= 0:
        return []
    helpers = [(e, rank) for rank, e in enumerate(excess) if e < 0]  # the most room first
    heapq.heapify(helpers)
    hot = np.flatnonzero(np.repeat(native > capacity, local))
    hot = hot[np.argsort(-rows[hot], kind="stable")]
    lent = []
    for expert, count in zip(hot.tolist(), rows[hot].tolist(), strict=True):
        home = expert // local
        left, shares = min(count, excess[home]), []
        while left >= max(min_rows, 1) and helpers:
            room, helper = helpers[0]
            take = min(left, -room)
            if take < min_rows:
                helpers.clear()  # nobody has room for a range worth its weights
                break
            shares.append((helper, take))
            left, excess[home] = left - take, excess[home] - take
            if room + take:
                heapq.heapreplace(helpers, (room + take, helper))
            else:
                heapq.heappop(helpers)
        start = count - sum(take for _, take in shares)
        for helper, take in shares:
            lent.append((expert, helper, start, start + take))
            start += take
        if not helpers:
            break
    return lent


def _stage(kept: np.ndarray, helpers: np.ndarray) -> np.ndarray:
    """
    0 for native experts that a destination takes before its foreign ones, 2 for those after them. kept: [P, E // P].

    Foreign experts in the middle leave native rows to compute while weights arrive and gradients return. The middle is
    another one for each helper, so that a home does not lend to all of them at one time.
    """
    turn = np.zeros(len(kept), dtype=np.int64)
    unique = np.unique(helpers)
    turn[unique] = np.arange(len(unique))
    before = kept.cumsum(1) - kept
    return np.where(before * (2 * len(unique)) >= kept.sum(1, keepdims=True) * (2 * turn + 1)[:, None], 2, 0)
