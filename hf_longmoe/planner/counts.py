"""Counts of a model's own bytes at a few small sizes, and what they say of any size.

What a schedule does not bound (attention, norms, routers, a kernel's temporaries) differs from family to family, and
no list of formulas keeps up with them. It is counted instead, once, in fake steps of a few layers and a few thousand
tokens. In a given phase, with a given component at work, bytes are affine in the layers (see `depth`) and in the
tokens, or quadratic in a sequence's length where a model compares all positions (a sparse-attention indexer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hf_longmoe.peaks.ledger import Moment
from hf_longmoe.planner.depth import Moments, within

__all__ = ["Counts"]

_SAME = 0.1  # relative difference of two bends of one parabola
_BENT = 1e-3  # what of a count its quadratic part is at least


@dataclass(frozen=True)
class Counts:
    """
    Arguments:
        depth: layers of the model.
        depths: of the counts, one or two ascending; the real depth is a whole number of their distance away.
        lengths: tokens of a sequence, at least two ascending; the counts are of one sequence. Four tell a parabola.
        moments: by depth and length, as indices.
    """

    depth: int
    depths: tuple[int, ...]
    lengths: tuple[int, ...]
    moments: Sequence[Sequence[Moments]]

    @property
    def bent(self) -> bool:
        """Whether something grows with the square of the length."""
        return any(
            _curvature(self.lengths, [at[key].highs[name] if key in at else 0 for at in self.moments[-1]])
            for key, moment in self.moments[-1][-1].items()
            for name in moment.highs
        )

    def at(self, length: int, sequences: int = 1, sharing: int = 1) -> dict[tuple[str, str], Moment]:
        """
        The model's moments at its real depth, in bytes.

        Arguments:
            length: tokens of a sequence on the rank.
            sequences: of one forward.
            sharing: ranks that share a sequence: what compares all positions has so many times the rank's own.
        """

        def scaled(pick: Callable[[Moment], Mapping[str, int]], key: tuple[str, str]) -> dict[str, int]:
            return self._values([[pick(at[key]) if key in at else None for at in row] for row in self.moments], size)

        size, found = (length, sequences, sharing), {}
        for key, moment in self.moments[-1][-1].items():
            highs = {part: max(0, high) for part, high in scaled(lambda at: at.highs, key).items()}
            levels = {
                name: within(name, scaled(lambda at, name=name: at.levels.get(name), key), highs)
                for name in moment.levels
            }
            found[key] = Moment(highs, {name: values for name, values in levels.items() if values is not None})
        return found

    def _values(
        self, rows: Sequence[Sequence[Mapping[str, int] | None]], size: tuple[int, int, int]
    ) -> dict[str, int]:
        found, deepest = {}, rows[-1]
        for name, largest in deepest[-1].items():
            # What is not there at one depth is as at the other; at one length, as at the longest.
            full = [largest if at is None else at.get(name, 0) for at in deepest]
            ends = [
                _through(self.lengths, [full[j] if at is None else at.get(name, 0) for j, at in enumerate(row)], *size)
                for row in rows
            ]
            value = ends[0]
            if len(self.depths) == 2:
                value += (ends[1] - ends[0]) * (self.depth - self.depths[0]) / (self.depths[1] - self.depths[0])
            found[name] = round(value)
        return found


def _through(lengths: Sequence[int], values: Sequence[int], length: int, sequences: int, sharing: int) -> float:
    """
    From counted length to counted length, and beyond the last in its direction.

    A highest of several moments is a chain of lines, in all tokens. A parabola, in those of a sequence, is told from
    one by its bend, which is everywhere the same.
    """
    bend, tokens = _curvature(lengths, values), sequences * length
    pairs = [(at, value - bend * at * at) for at, value in zip(lengths, values, strict=True)]
    i = next((i for i, (at, _) in enumerate(pairs[1:-1]) if tokens < at), len(pairs) - 2)
    (a, u), (b, v) = pairs[max(i, 0)], pairs[max(i, 0) + 1]
    slope = (v - u) / (b - a)
    return u + slope * (tokens - a) + bend * tokens * length * sharing


def _curvature(lengths: Sequence[int], values: Sequence[int]) -> float:
    """The quadratic coefficient, if the last four points are of one parabola; else 0."""
    pairs = list(zip(lengths, values, strict=True))
    if len(pairs) < 4:
        return 0.0
    first, second = _bend(pairs[-4:-1]), _bend(pairs[-3:])
    same = second > 0 and abs(first - second) < _SAME * second
    return second if same and second * lengths[-1] ** 2 > _BENT * values[-1] else 0.0


def _bend(pairs: Sequence[tuple[int, float]]) -> float:
    """The quadratic coefficient of the parabola through three points."""
    (a, u), (b, v), (c, w) = pairs
    return ((w - v) / (c - b) - (v - u) / (b - a)) / (c - a)
