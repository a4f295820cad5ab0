"""Integers only: how many rows a budget holds, and which rows share a wave. Knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_longmoe.schedules.rehearsal import each
from hf_longmoe.sizes import TooSmall

__all__ = ["MIN_ROWS", "Segment", "Wave", "plan_waves", "rows", "shown_waves"]

MIN_ROWS = 4  # "a few rows": fewer make a wave of overhead


@dataclass(frozen=True)
class Segment:
    """Rows `start` to `stop` of the expert-major order, all of one `expert`; its `first` rows, its `last`, or both."""

    expert: int
    start: int
    stop: int
    first: bool
    last: bool

    def kind(self) -> tuple[int, bool, bool]:
        """What the memory of its computation depends on."""
        return self.stop - self.start, self.first, self.last


@dataclass(frozen=True)
class Wave:
    """Rows in flight together: consecutive in the expert-major order, at least one segment."""

    segments: tuple[Segment, ...]

    @property
    def start(self) -> int:
        return self.segments[0].start

    @property
    def stop(self) -> int:
        return self.segments[-1].stop

    def kind(self) -> tuple[tuple[int, bool, bool], ...]:
        """As `Segment.kind`."""
        return tuple(segment.kind() for segment in self.segments)

    @property
    def experts(self) -> range:
        """From the first expert of the wave to its last; some between may have no rows."""
        return range(self.segments[0].expert, self.segments[-1].expert + 1)


def rows(budget: int, bytes_per_row: int, *, share: int = 1, what: str = "dispatch.budget") -> int:
    """
    The rows (or tokens, for a token-wise module) that `budget` bytes hold.

    The one conversion of bytes into rows: schedule, planner and validation call it.

    Arguments:
        budget: bytes.
        bytes_per_row: bytes of one row in flight in the direction that needs most (see `blocks.py`).
        share: one part of so many of `budget` is for rows.
        what: the argument that an error names.

    Raises:
        `TooSmall` (a `ValueError`): the budget holds fewer than `MIN_ROWS` rows.
    """
    count = -(-budget // share) // bytes_per_row
    if count < MIN_ROWS:
        raise TooSmall(
            f"{what}={budget} bytes is below one wave of {MIN_ROWS} rows; "
            f"a row takes {share * bytes_per_row} bytes here, so give at least {share * MIN_ROWS * bytes_per_row}."
        )
    return count


def plan_waves(counts: Sequence[int], limit: int, max_experts: int | None = None) -> list[Wave]:
    """
    Cuts the expert-major order into waves of at most `limit` rows and at most `max_experts` consecutive experts.

    An expert that fits one wave is never split, so that its weight gradient is computed once; a larger one is cut into
    equal parts, alone in their waves but for the last. An expert without rows appears in no wave.

    Arguments:
        counts: rows of each expert, in order.
        limit: rows of a wave at most, at least 1.
    """
    waves: list[Wave] = []
    open_: list[Segment] = []
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        parts = -(-count // limit)
        for part in range(parts):
            stop = start + (count * (part + 1) // parts - count * part // parts)
            segment = Segment(expert, start, stop, first=part == 0, last=part == parts - 1)
            full = open_ and stop - open_[0].start > limit
            wide = open_ and max_experts and expert - open_[0].expert >= max_experts
            if full or wide:
                waves.append(Wave(tuple(open_)))
                open_ = []
            open_.append(segment)
            start = stop
    if open_:
        waves.append(Wave(tuple(open_)))
    return waves


def shown_waves(waves: Sequence[Wave]) -> list[Wave]:
    """Those that a rehearsal runs. An expert that spans several has its first and its last among them, or none."""
    spans: list[list[Wave]] = [[]]
    for wave in waves:
        spans[-1].append(wave)
        if wave.segments[-1].last:
            spans.append([])
    shown = each(spans, kind=lambda span: tuple(map(Wave.kind, span)))
    return [wave for span in shown for wave in each(span, kind=Wave.kind)]
