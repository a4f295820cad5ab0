"""How far each (source, destination) pair has come after each wave. Integers only; vectorised over pairs and waves.

The rows that a source sends to a destination form a queue: in the destination's order of experts, and within an
expert in the source's own order. A `pace` [W + 1, P, P] (destination, then source) says how much of each queue has
gone before wave 0, 1, .., W. It starts at zero, never falls, and ends at the queues' lengths, so every row goes once.
What is left to choose is a pace that keeps every rank's rows of every wave under the limit: `first_pace`.
"""

from __future__ import annotations

import numpy as np

from hf_longmoe.schedules.dispatch.placement import Placement
from hf_longmoe.schedules.dispatch.repair import repair

__all__ = ["Queues", "first_pace", "prefixes"]


def prefixes(counts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """
    How many of an expert's first rows come from each source, in one fixed total order that interleaves the sources.

    Row i of source s lies at (2i + 1) / (2·c_s) of the expert's rows (the keys of Sainte-Lague). The order goes by
    cells of a grid on these keys, n // (P + 2) cells of about P + 2 rows each, and within a cell by source. A prefix
    of a total order never falls in any source as it grows; largest remainders would (the Alabama paradox). No source
    is ahead of its proportional part by more than its rows in a cell and one half.

    Exact for counts up to 2**40: the number of keys up to cell j is floor(c_s·j/G + 1/2) in float64, where rounding is
    monotone in j and ends at c_s, so it need not be the nearest.

    Arguments:
        counts: int64 [N, P], rows of one expert by source.
        rows: int64 [N], rows of the prefix, 0 to the expert's rows.

    Returns:
        int64 [N, P], each row's sum is `rows`.
    """
    total = counts.sum(1)
    cells = np.maximum(total // (counts.shape[1] + 2), 1)
    c = counts.astype(np.float64)

    def keys(cell: np.ndarray) -> np.ndarray:
        at = c * (cell / cells)[:, None]
        at += 0.5
        return np.floor(at, out=at)

    # The keys up to cell j differ from n·j/G by at most P / 2, under half a cell: so the prefix ends beside cell j.
    near = np.rint(rows * (cells / np.maximum(total, 1)))
    a = keys(near)
    over = a.sum(1) > rows
    b = keys(np.clip(np.where(over, near - 1, near + 1), 0, cells))
    lower = np.where(over[:, None], b, a)
    cell = np.abs(b - a)
    ends = cell.cumsum(1)
    ends -= cell
    left = (rows - lower.sum(1))[:, None] - ends
    lower += np.minimum(np.maximum(left, 0, out=left), cell, out=left)
    return lower.astype(np.int64)


class Queues:
    """
    The queues of one placement. n segments, as in `Placement`.

    `begin`, `own`, `before`: int64 [n, P], by source: the first of its rows of the expert that lie in the segment, how
    many do, and how many of its rows for that destination come earlier. `lengths`: int64 [P, P], destination, source.
    """

    def __init__(self, counts: np.ndarray, placed: Placement) -> None:
        self.placed, self.ranks = placed, len(counts)
        self.columns = np.ascontiguousarray(counts.T)  # [E, P]
        c = self.columns[placed.expert]
        self.begin, self.own = np.zeros_like(c), c.copy()
        partial = np.flatnonzero(placed.stop - placed.start < c.sum(1))
        edges = np.concatenate([placed.start[partial], placed.stop[partial]])
        begin, end = np.split(self._prefixes(placed.expert[np.tile(partial, 2)], edges), 2)
        self.begin[partial], self.own[partial] = begin, end - begin
        ends = np.concatenate([np.zeros((1, self.ranks), dtype=np.int64), self.own.cumsum(0)])
        edge = np.searchsorted(placed.destination, np.arange(self.ranks + 1))
        self.before = ends[:-1] - ends[edge[:-1]][placed.destination]
        self.lengths = ends[edge[1:]] - ends[edge[:-1]]
        self.edge = edge.tolist()

    def _prefixes(self, expert: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """`prefixes` of some experts. Their cells begin at different sources, so that roundings cancel."""
        local = len(self.columns) // self.ranks
        turn = (expert // local + expert % local)[:, None]
        rank = np.arange(self.ranks)
        turned = prefixes(np.take_along_axis(self.columns[expert], (rank + turn) % self.ranks, 1), rows)
        return np.take_along_axis(turned, (rank - turn) % self.ranks, 1)

    def by_ranges(self, waves: int) -> np.ndarray:
        """
        The pace that cuts every destination's own order into equal ranges: all sources stay at the same expert.

        Experts finish early, so this is the pace to prefer; but a source may be the only one in many ranges of a wave.
        """
        placed = self.placed
        active = np.flatnonzero(placed.load)
        size = placed.stop - placed.start
        ends = size.cumsum()
        load = placed.load[active]
        step = np.arange(1, waves)[:, None]
        at = (load // waves * step + load % waves * step // waves) + (placed.load.cumsum() - placed.load)[active]
        segment = np.searchsorted(ends, at.reshape(-1), side="right")
        rows = at.reshape(-1) - (ends - size)[segment] + placed.start[segment]
        cut = self._prefixes(placed.expert[segment], rows) - self.begin[segment] + self.before[segment]
        pace = np.zeros((waves + 1, self.ranks, self.ranks), dtype=np.int64)
        pace[1:-1, active] = cut.reshape(waves - 1, len(active), self.ranks)
        pace[-1] = self.lengths
        return pace

    def by_pairs(self, waves: int) -> np.ndarray:
        """The pace that cuts every queue into equal parts by itself, the odd rows in waves that differ by pair."""
        rank = np.arange(self.ranks)
        phase = (rank[:, None] + rank) % self.ranks * waves // self.ranks
        step = np.arange(waves + 1)[:, None, None]
        return self.lengths // waves * step + (self.lengths % waves * step + phase) // waves

    def foreign_spans(self, pace: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first and the last wave that use each foreign segment, in the order of `Placement.foreign`."""
        at = self.placed.foreign
        own = self.own[at]
        gone = np.clip(pace[:, self.placed.destination[at]] - self.before[at], 0, own).sum(2)
        return (gone[1:] == 0).sum(0), (gone[:-1] < own.sum(1)).sum(0) - 1


def first_pace(queues: Queues, bound: int, limit: int) -> np.ndarray:
    """
    Equal ranges in `bound` waves, if all but roundings is under the limit; else in one more; else equal parts of each
    queue in `bound` waves, with single rows moved to other waves where roundings exceed the limit.

    So the number of waves is never more than `bound` + 1, for any routing.

    Arguments:
        bound: waves that the largest load and the largest source need at least; 0 if there are no rows.
        limit: rows that a rank may send, and may receive, in one wave.
    """
    if not bound:
        return np.zeros((1, queues.ranks, queues.ranks), dtype=np.int64)
    pace = queues.by_ranges(bound)
    over = _most(pace) - limit
    if over > queues.ranks // 2:
        pace = queues.by_ranges(bound + 1)
        over = _most(pace) - limit
        if over > 0:
            pace = queues.by_pairs(bound)
            over = _most(pace) - limit
    if over > 0:
        pace = repair(pace, limit)
    moving = (pace[1:] != pace[:-1]).any((1, 2))
    return np.concatenate([pace[:1], pace[1:][moving]])


def _most(pace: np.ndarray) -> int:
    """The most rows that a rank sends, or receives, in a wave."""
    takes = np.diff(pace, axis=0)
    return int(max(takes.sum(1).max(), takes.sum(2).max()))
