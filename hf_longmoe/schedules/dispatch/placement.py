"""Which destination computes which rows: least-loaded placement. Integers only.

An expert's rows, numbered 0 to its count, stay at its home up to some row; ranges from there to the end may be lent to
ranks with fewer rows than the mean, each (expert, destination) at most once. No destination passes the mean by being
lent rows, so the largest load never grows. Follows LLEP (arXiv 2601.17111) at capacity factor 1.0, with a limit on
foreign experts.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

__all__ = ["Placement", "place"]


@dataclass(frozen=True, eq=False)
class Placement:
    """
    Segments: rows `start` to `stop` of `expert`, computed at `destination`; none is empty.

    They are sorted by destination, and then by the order in which the destination takes them. All arrays are int64.
    """

    expert: np.ndarray
    destination: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    foreign: np.ndarray
    """Indices of the segments that are lent, by (destination, expert)."""
    load: np.ndarray
    """[P] rows per destination."""
    native: np.ndarray
    """[P] rows per destination if nothing were lent."""

    @property
    def most_foreign(self) -> int:
        """The most foreign experts that a rank has to do with, as a helper and as a home together."""
        local = len(self.rows_kept) // len(self.load)
        homes = self.expert[self.foreign] // local
        ranks = np.concatenate([homes, self.destination[self.foreign]])
        return int(np.bincount(ranks, minlength=1).max())

    rows_kept: np.ndarray
    """[E] rows of each expert that stay at its home."""


def place(rows: np.ndarray, ranks: int, *, imbalance: float, min_rows: int, limit: int) -> Placement:
    """
    Arguments:
        rows: int64 [E], rows of each expert over all sources.
        ranks: P, which divides E; expert e lives on rank e // (E // P).
        imbalance: lend only where the largest native load is at least so many times the mean.
        min_rows: a lent range carries at least so many rows.
        limit: foreign experts that one rank may have to do with, those it is lent and those it lends together.
    """
    local = len(rows) // ranks
    native = rows.reshape(ranks, local).sum(1)
    lent = []
    if limit > 0 and native.max() * ranks >= imbalance * native.sum():
        lent = _lend(rows, native, min_rows, limit)
    expert, destination, start, stop = np.array(lent, dtype=np.int64).reshape(-1, 4).T

    kept, load = rows.copy(), native.copy()
    np.subtract.at(kept, expert, stop - start)
    np.subtract.at(load, expert // local, stop - start)
    np.add.at(load, destination, stop - start)

    home = np.flatnonzero(kept)
    stage = _stage(kept.reshape(ranks, local), destination).reshape(-1)[home]
    columns = (
        np.concatenate([home, expert]),
        np.concatenate([home // local, destination]),
        np.concatenate([np.zeros_like(home), start]),
        np.concatenate([kept[home], stop]),
    )
    order = np.lexsort((columns[0], np.concatenate([stage, np.ones_like(expert)]), columns[1]))
    expert, destination, start, stop = (column[order] for column in columns)
    foreign = np.flatnonzero(expert // local != destination)
    return Placement(expert, destination, start, stop, foreign, load, native, kept)


def _lend(rows: np.ndarray, native: np.ndarray, min_rows: int, limit: int) -> list[tuple[int, int, int, int]]:
    """
    (expert, destination, start, stop) of every lent range: largest experts first, each to the least-loaded rank.

    A range ends where its expert's excess or its helper's room does, so an expert never comes to a helper twice.
    """
    ranks = len(native)
    local = len(rows) // ranks
    mean = -(-int(native.sum()) // ranks)
    excess = (native - mean).tolist()
    helpers = [(e, rank) for rank, e in enumerate(excess) if e < 0]  # the most room first
    heapq.heapify(helpers)
    used = [0] * ranks
    hot = np.flatnonzero(np.repeat(native > mean, local) & (rows > 0))
    hot = hot[np.argsort(-rows[hot], kind="stable")]
    lent = []
    for expert, stop in zip(hot.tolist(), rows[hot].tolist(), strict=True):
        home = expert // local
        left = min(stop, excess[home])
        while left >= max(1, min_rows) and helpers and used[home] < limit:
            room, helper = helpers[0]
            take = min(left, -room)
            if take < min_rows:
                return lent  # nobody has room for a range worth its weights
            lent.append((expert, helper, stop - take, stop))
            stop, left, excess[home] = stop - take, left - take, excess[home] - take
            used[home], used[helper] = used[home] + 1, used[helper] + 1
            if room + take and used[helper] < limit:
                heapq.heapreplace(helpers, (room + take, helper))
            else:
                heapq.heappop(helpers)
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
