"""Moves single rows between waves until every rank's rows of every wave are under the limit. Integers only.

A wave is a matrix of rows by destination and source. If no rank has more than W·limit rows in all, W waves exist
whose row and column sums are all within the limit: the edge colouring theorem for bipartite multigraphs (König 1916),
with waves as colours and `limit` rows of one colour at a rank. The proof is the algorithm: a row whose two ranks have
no wave with room in common gets one by exchanging two waves along an alternating path.
"""

from __future__ import annotations

import numpy as np

__all__ = ["repair"]


def repair(pace: np.ndarray, limit: int) -> np.ndarray:
    """
    The same queues in the same number of waves W, no rank over `limit` rows in any.

    Arguments:
        pace: int64 [W + 1, P, P], see `queues.py`; no rank may have more than W·limit rows in all.
        limit: rows that a rank may send, and may receive, in one wave.
    """
    waves = _Waves(np.diff(pace, axis=0), limit)
    missing = pace[-1] - waves.takes.sum(0)
    waves.fill(missing)
    for destination, source in np.argwhere(missing):
        for _ in range(missing[destination, source]):
            waves.insert(destination, source)
    return np.concatenate([pace[:1], waves.takes.cumsum(0)])


class _Waves:
    """`takes` [W, P, P]; the room left in each wave, by destination `to` [W, P] and by source `by` [W, P]."""

    def __init__(self, takes: np.ndarray, limit: int) -> None:
        for axis in (2, 1):  # drop what is over the limit: rows of the last sources, then of the last destinations
            over = takes.cumsum(axis) - takes
            takes = np.clip(limit - over, 0, takes)
        self.takes, self.to, self.by = takes, limit - takes.sum(2), limit - takes.sum(1)

    def fill(self, missing: np.ndarray) -> None:
        """Puts missing rows where both ranks have room. The pairs of one round share no rank: one vector operation."""
        to = np.arange(len(missing))
        for turn in range(len(missing)):
            by = (to + turn) % len(missing)
            if not missing[to, by].any():
                continue
            room = np.minimum(self.to, self.by[:, by])
            put = np.clip(missing[to, by] - (room.cumsum(0) - room), 0, room)
            self.takes[:, to, by] += put
            self.to -= put
            self.by[:, by] -= put
            missing[to, by] -= put.sum(0)

    def insert(self, destination: int, source: int) -> None:
        """Puts one row of the pair into a wave where the source has room, after making room for it there."""
        both = np.minimum(self.to[:, destination], self.by[:, source])
        wave = int(both.argmax())
        if not both[wave]:
            wave = int(self.by[:, source].argmax())
            self.exchange(destination, wave, int(self.to[:, destination].argmax()))
        self.takes[wave, destination, source] += 1
        self.to[wave, destination] -= 1
        self.by[wave, source] -= 1

    def exchange(self, destination: int, a: int, b: int) -> None:
        """
        Moves one row of `destination` from wave a, where it has no room, to wave b, where it has.

        Rows are exchanged along a shortest path: from wave a to b on its odd steps, from b to a on its even ones,
        until a rank is reached that has room. A source that is full in b can only be passed, and keeps its room in a.
        """
        came: dict[int, int] = {}  # source: the destination whose row of wave a it gives to wave b
        back: dict[int, int] = {}  # destination: the source whose row of wave b it gives to wave a
        frontier, seen = [destination], {destination}
        while frontier:
            reached = []
            for to in frontier:
                for by in np.flatnonzero(self.takes[a, to]).tolist():
                    if by in came:
                        continue
                    came[by] = to
                    if self.by[b, by]:
                        self.by[b, by] -= 1
                        self.by[a, by] += 1
                        return self._flip(destination, a, b, by, came, back)
                    for other in np.flatnonzero(self.takes[b, :, by]).tolist():
                        if other in seen:
                            continue
                        seen.add(other)
                        back[other] = by
                        if self.to[a, other]:
                            self.to[a, other] -= 1
                            self.to[b, other] += 1
                            self._move(b, a, other, by)
                            return self._flip(destination, a, b, by, came, back)
                        reached.append(other)
            frontier = reached
        raise AssertionError("no alternating path: a rank has more rows than all waves hold")

    def _flip(self, destination: int, a: int, b: int, by: int, came: dict[int, int], back: dict[int, int]) -> None:
        while True:
            to = came[by]
            self._move(a, b, to, by)
            if to == destination:
                break
            by = back[to]
            self._move(b, a, to, by)
        self.to[a, destination] += 1
        self.to[b, destination] -= 1

    def _move(self, a: int, b: int, to: int, by: int) -> None:
        self.takes[a, to, by] -= 1
        self.takes[b, to, by] += 1
