"""From two small depths to the real one. Integers only.

A step's bytes at a given moment (the backward of the last layer, say) are affine in the number of layers: each period
of layers adds the same parameters, gradients and boundaries. Peaks are not, since at another depth they may fall on
another moment. So every candidate is extrapolated (for each phase and component at work: each component's highest, and
all components' bytes when one is highest, or their sum), and the largest is taken. Where the sum is highest at one
moment in one run and at another in the other, these have no line: what is of no moment (more of a component than it
ever has, or less than none) is left out. Left out too are two moments of one candidate, of which the one that grows is
the smaller in both runs. The result is then too low.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from hf_longmoe.peaks.ledger import TOTAL, Moment
from hf_longmoe.peaks.region import COMPONENTS
from hf_longmoe.peaks.report import ComponentPeak, PeakReport

__all__ = ["Moments", "extrapolate", "periods", "within"]

_MOVED = 0.01  # of what a moment has at most

# By phase and what is at work (`peaks.region.Region.at_work`).
Moments = Mapping[tuple[str, str], Moment]


def periods(kinds: Sequence[Hashable]) -> tuple[int, int]:
    """
    How layers repeat: `(prefix, period)`, the shortest that describe them (`prefix + period` least).

    After `prefix` layers, each layer is of the kind of the one `period` before it. The last period may be incomplete.

    ```py
    >>> periods(["dense", "dense", "sparse", "sparse", "sparse"])
    (2, 1)
    >>> periods(["sliding", "full"] * 3)
    (0, 2)

    ```
    """
    count = len(kinds)
    for size in range(1, count + 1):
        for period in range(1, size + 1):
            prefix = size - period
            if all(kinds[i] == kinds[i - period] for i in range(prefix + period, count)):
                return prefix, period
    return 0, max(count, 1)


def depths(kinds: Sequence[Hashable]) -> tuple[int, ...]:
    """
    The two smallest depths with the layers' pattern, a period apart and a whole number of periods from the real one;
    the real depth alone where that is no larger.
    """
    prefix, period = periods(kinds)
    rest = (len(kinds) - prefix) % period
    first = prefix + period + rest
    return (first, first + period) if first + period < len(kinds) else (len(kinds),)


def within(name: str, levels: Mapping[str, int], tops: Mapping[str, int]) -> dict[str, int] | None:
    """
    What a line gave for one moment, between nothing and the highest of each component.

    Arguments:
        name: of the moment, see `peaks.ledger.Moment`. Two moments of one candidate may make a line that is of
            neither: `None` where that moves `TOTAL`.
    """
    found = {part: min(max(0, level), tops[part]) for part, level in levels.items()}
    moved = sum(abs(level - found[part]) for part, level in levels.items())
    return None if name == TOTAL and moved > _MOVED * sum(tops.values()) else found


def extrapolate(
    depths: tuple[int, int], reports: tuple[PeakReport, PeakReport], moments: tuple[Moments, Moments], depth: int
) -> PeakReport:
    """
    The report of a step at `depth`.

    Arguments:
        depths: of `reports` and of `moments`, ascending.
        depth: the real one, a whole number of `depths[1] - depths[0]` away.

    Raises:
        `ValueError`: it is not.
    """
    step, far = depths[1] - depths[0], depth - depths[0]
    if step < 1 or far < 0 or far % step:
        raise ValueError(f"depth={depth} is no whole number of periods of {step} layers from {depths[0]}.")
    times = far // step

    def line(a: int, b: int) -> int:
        return a + (b - a) * times

    def lines(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
        return {key: line(a.get(key, 0), b[key]) for key in b}

    small, large = reports
    ends, phase_highs = [], {}
    for key, there in moments[1].items():
        here = moments[0].get(key, there)
        tops = {part: max(0, top) for part, top in lines(here.highs, there.highs).items()}
        for name, levels in there.levels.items():
            found = within(name, lines(here.levels.get(name, levels), levels), tops)
            if found is not None:
                ends.append((key[0], found))
        highs = phase_highs.setdefault(key[0], dict.fromkeys(COMPONENTS, 0))
        for name, level in tops.items():
            highs[name] = max(highs[name], level)
    at_peak = max((levels for _, levels in ends), key=lambda levels: sum(levels.values()))
    phases: dict[str, int] = {}
    for phase, levels in ends:
        phases[phase] = max(phases.get(phase, 0), sum(levels.values()))
    components = {}
    for name in COMPONENTS:
        a, b = small.components[name], large.components[name]
        highs = {phase: levels[name] for phase, levels in phase_highs.items()}
        components[name] = ComponentPeak(
            peak=max(highs.values()),
            at_peak=at_peak[name],
            working=max(0, line(a.working, b.working)),
            phases=highs,
        )
    return PeakReport(total=sum(at_peak.values()), components=components, phases=phases, probe=large.probe)
