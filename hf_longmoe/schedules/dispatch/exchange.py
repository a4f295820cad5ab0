"""The plan of one layer's dispatch under expert parallelism: which rows go where in which wave. Integers only.

A pure function of the counts that all ranks have gathered, so every rank computes the same plan. Placement says which
destination computes which rows (`placement.py`); a pace cuts them into waves (`queues.py`). Rows are numbered by their
source, in its token order, from 0 for each (source, expert).

    caps.rows    bounds what a rank sends, and what it receives, in any wave, for any routing
    caps.foreign bounds the weights and gradients of other ranks' experts that a rank holds at any time

The number of waves is the lower bound or one more, for any routing: see `first_pace`.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass

import numpy as np

from hf_longmoe.schedules.dispatch.lending import ForeignBytes, placements
from hf_longmoe.schedules.dispatch.placement import Placement
from hf_longmoe.schedules.dispatch.queues import Queues, first_pace

__all__ = ["ExchangeCaps", "ExchangePlan", "plan_exchange"]

_MOST = 2**40  # rows of one (source, expert); float64 is exact enough up to there


@dataclass(frozen=True)
class ExchangeCaps:
    """
    Arguments:
        rows: rows a rank may send, and may receive, in one wave; at least the number of ranks.
        foreign: bytes of foreign weights and of their gradients that a rank may hold at any time; 0 never lends.
        weight_bytes: bytes of one expert's weights, as they travel.
        gradient_bytes: bytes of one expert's gradients.
        imbalance: lend only where the largest native load is at least so many times the mean.
        min_rows: a lent range carries at least so many rows.
        depth: weights are fetched so many waves ahead.

    `imbalance` and `min_rows` are about time only: the caps hold whatever they are.
    """

    rows: int
    foreign: int = 0
    weight_bytes: int = 1
    gradient_bytes: int = 1
    imbalance: float = 1.3
    min_rows: int = 1
    depth: int = 1

    def __post_init__(self) -> None:
        for name, least in [
            ("rows", 1),
            ("foreign", 0),
            ("weight_bytes", 1),
            ("gradient_bytes", 1),
            ("min_rows", 1),
            ("depth", 0),
        ]:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"ExchangeCaps.{name}={value!r} must be an integer, at least {least}.")
        if not self.imbalance >= 1:
            raise ValueError(f"ExchangeCaps.imbalance={self.imbalance!r} must be at least 1 (1 always lends).")


def plan_exchange(counts: np.ndarray, caps: ExchangeCaps) -> ExchangePlan:
    """
    The plan of one layer: the same on every rank that calls it with the same arguments.

    Arguments:
        counts: integers [P, E] (array or nested lists), rows of each source for each expert, at most 2**40 each.
            Expert e lives on rank e // (E // P).
        caps: what a rank may hold.

    Raises:
        `ValueError`: counts of another shape or sign, P does not divide E, or `caps.rows` below P.
    """
    counts = _checked(counts, caps)
    most_sent = int(counts.sum(1).max())

    def bound(placed: Placement) -> int:
        return -(-max(int(placed.load.max()), most_sent) // caps.rows)

    foreign = ForeignBytes(caps.weight_bytes, caps.gradient_bytes, caps.depth)
    limits = {"imbalance": caps.imbalance, "min_rows": caps.min_rows}
    for placed in placements(counts.sum(0), len(counts), caps.foreign, foreign, bound, **limits):
        queues = Queues(counts, placed)
        plan = ExchangePlan(queues, first_pace(queues, bound(placed), caps.rows), bound(placed), caps, foreign)
        if plan.foreign_peak() <= caps.foreign:
            return plan
    raise AssertionError("the last placement holds the cap whatever the waves are")


def _checked(counts: np.ndarray, caps: ExchangeCaps) -> np.ndarray:
    counts = np.asarray(counts)
    if counts.ndim != 2 or not counts.size or not np.issubdtype(counts.dtype, np.integer):
        raise ValueError(
            f"counts must be integers [ranks, experts], got shape {tuple(counts.shape)} and dtype {counts.dtype}."
        )
    ranks, experts = counts.shape
    if experts % ranks:
        raise ValueError(f"counts: {experts} experts cannot be shared by {ranks} ranks; give a multiple of {ranks}.")
    if counts.min() < 0 or counts.max() > _MOST:
        raise ValueError(f"counts must lie between 0 and 2**40, got {counts.min()} to {counts.max()}.")
    if caps.rows < ranks:
        raise ValueError(f"ExchangeCaps.rows={caps.rows} must be at least the number of ranks, {ranks}.")
    return counts.astype(np.int64)


class ExchangePlan:
    """
    What every rank sends, receives, lends and returns in every wave. Lists are made for one rank and wave when asked.

    A destination takes its experts in a fixed order of pieces. A source sends by destination, to each in that order.
    """

    def __init__(
        self, queues: Queues, pace: np.ndarray, lower_bound: int, caps: ExchangeCaps, foreign: ForeignBytes
    ) -> None:
        placed = queues.placed
        self._queues, self._pace, self._caps = queues, pace, caps
        self.num_waves: int = len(pace) - 1
        self.ranks: int = queues.ranks
        self.lower_bound: int = lower_bound
        """Waves that the caps need for the placement: ceil(max(largest load, largest total of a source) / rows)."""
        self.load: list[int] = placed.load.tolist()
        """Rows per destination."""
        self.native: list[int] = placed.native.tolist()
        """Rows per destination if nothing were lent."""
        self._lent = _Lent(placed, *queues.foreign_spans(pace))
        self._sent: dict[int, list[list[tuple]]] = {}
        self._received: dict[int, list[list[tuple]]] = {}
        self._peak = foreign.peak(placed, self._lent.first, self._lent.last, self.num_waves)
        self.moves: list[tuple[int, int]] = sorted((e, d) for d, e in self._lent.pairs(slice(None)))
        """(expert, destination) of every range that is lent."""

    def sends(self, rank: int, wave: int) -> list[tuple[int, int, int]]:
        """(expert, start, stop): the rank's own rows of that expert, in sending order; no range is empty."""
        self._check(wave)
        if rank not in self._sent:
            q = self._queues
            gone = self._pace[:, q.placed.destination, rank] - q.before[:, rank]
            gone = np.minimum(np.maximum(gone, 0), q.own[:, rank])
            waves, at = np.nonzero(gone[:-1] < gone[1:])
            columns = q.placed.expert[at], q.begin[at, rank] + gone[waves, at], q.begin[at, rank] + gone[waves + 1, at]
            self._sent[rank] = self._by_wave(waves, *columns)
        return list(self._sent[rank][wave])

    def send_splits(self, rank: int, wave: int) -> list[int]:
        """Rows to each destination."""
        self._check(wave)
        return (self._pace[wave + 1, :, rank] - self._pace[wave, :, rank]).tolist()

    def receives(self, rank: int, wave: int) -> list[tuple[int, list[int]]]:
        """(expert, rows from each source) of each piece, in order. The received buffer is laid out [source][piece]."""
        self._check(wave)
        if rank not in self._received:
            q = self._queues
            mine = slice(q.edge[rank], q.edge[rank + 1])
            gone = self._pace[:, rank, None] - q.before[mine]
            rows = np.diff(np.minimum(np.maximum(gone, 0), q.own[mine]), axis=0)
            waves, at = np.nonzero(rows.any(2))
            self._received[rank] = self._by_wave(waves, q.placed.expert[mine][at], rows[waves, at])
        return list(self._received[rank][wave])

    def receive_splits(self, rank: int, wave: int) -> list[int]:
        """Rows from each source."""
        self._check(wave)
        return (self._pace[wave + 1, rank] - self._pace[wave, rank]).tolist()

    def fetches(self, rank: int, wave: int) -> list[int]:
        """Foreign experts that this destination uses first in this wave, ascending."""
        lent = self._lent
        return lent.expert[(lent.first == wave) & (lent.destination == rank)].tolist()

    def finishes(self, rank: int, wave: int) -> list[int]:
        """Foreign experts that this destination uses last in this wave, ascending."""
        lent = self._lent
        return lent.expert[(lent.last == wave) & (lent.destination == rank)].tolist()

    def lends(self, home: int, wave: int) -> list[tuple[int, int]]:
        """(destination, expert of this home) whose first use is in this wave, by destination, then expert."""
        return self._lent.pairs((self._lent.first == wave) & (self._lent.home == home))

    def returns(self, home: int, wave: int) -> list[tuple[int, int]]:
        """(destination, expert of this home) whose last use is in this wave, by destination, then expert."""
        return self._lent.pairs((self._lent.last == wave) & (self._lent.home == home))

    def moves_weights(self, wave: int) -> bool:
        """Whether any rank fetches in this wave: the same on all ranks, so it may guard a collective."""
        return bool((self._lent.first == wave).any())

    def returns_weights(self, wave: int) -> bool:
        """Whether any rank finishes a foreign expert in this wave: the same on all ranks."""
        return bool((self._lent.last == wave).any())

    def foreign_peak(self) -> int:
        """Bytes of foreign weights and gradients that the worst rank holds in the worst wave; see `ForeignBytes`."""
        return self._peak

    @property
    def caps(self) -> ExchangeCaps:
        """What the plan was made for."""
        return self._caps

    @property
    def largest_receive(self) -> int:
        """Rows, of the worst rank and wave."""
        return int(np.diff(self._pace, axis=0).sum(2).max(initial=0))

    @property
    def largest_send(self) -> int:
        """Rows, of the worst rank and wave."""
        return int(np.diff(self._pace, axis=0).sum(1).max(initial=0))

    def digest(self) -> int:
        """63-bit hash of the waves and the caps, for ranks to compare before data moves."""
        q = self._queues
        content = hashlib.blake2b(repr((astuple(self._caps), self.ranks, self.num_waves)).encode(), digest_size=8)
        for array in (self._pace, q.placed.expert, q.placed.destination, q.begin, q.own):
            content.update(np.ascontiguousarray(array, dtype="<i8"))
        return int.from_bytes(content.digest(), "little") >> 1

    def _check(self, wave: int) -> None:
        if not 0 <= wave < self.num_waves:
            raise IndexError(f"wave={wave}: the plan has waves 0 to {self.num_waves - 1}.")

    def _by_wave(self, waves: np.ndarray, *columns: np.ndarray) -> list[list[tuple]]:
        """The rows of `columns` as tuples, in a list for each wave; `waves`: the wave of each row, ascending."""
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        edges = np.searchsorted(waves, np.arange(self.num_waves + 1)).tolist()
        return [rows[start:stop] for start, stop in zip(edges[:-1], edges[1:], strict=True)]


class _Lent:
    """The lent ranges, by (destination, expert), and their first and last waves. int64 arrays."""

    def __init__(self, placed: Placement, first: np.ndarray, last: np.ndarray) -> None:
        self.expert, self.destination = placed.expert[placed.foreign], placed.destination[placed.foreign]
        self.home, self.first, self.last = placed.home, first, last

    def pairs(self, which: np.ndarray | slice) -> list[tuple[int, int]]:
        return list(zip(self.destination[which].tolist(), self.expert[which].tolist(), strict=True))
