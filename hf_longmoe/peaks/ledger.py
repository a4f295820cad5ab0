"""The books of a probe that sees single storages: who owns which, and what was alive when."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch

from hf_longmoe.peaks.region import COMPONENTS, OTHER, Region
from hf_longmoe.peaks.report import ComponentPeak, PeakReport

__all__ = ["OWN", "TOTAL", "Context", "Ledger", "Moment", "Runs"]

TOTAL, OWN = "total", "own"

# The region and the phase in which a storage appears.
Context = tuple[Region, str]


class Moment(NamedTuple):
    """
    While one component was at work in one phase, bytes of each component.

    Arguments:
        highs: the highest of each.
        levels: of each, all of them when it was highest, the first time and the last, by `"dispatch, first"` and so on
            (of those times, also the ones with most of `layer`: kinds of layers may differ in this alone); and when
            their sum was, by `TOTAL`. (At another depth or length the sum may be highest at another moment.) And, by
            `OWN`, where a visit of what is at work had risen most from its lowest: what a schedule takes is in that,
            and perhaps not in the highest, which may be what it found when it began (see `_Visits`).
    """

    highs: dict[str, int]
    levels: dict[str, dict[str, int]]


class _Entry:
    __slots__ = ("component", "nbytes", "reference")

    def __init__(self, component: str, nbytes: int):
        self.component = component
        self.nbytes = nbytes


class Ledger:
    """
    A log of every storage that appeared, grew, shrank or died.

    The peaks are computed from the log afterwards and not on the way, so that a storage belongs to its last owner for
    its whole life: a gradient to `gradients` from the moment at which some component's backward made it, a layer's
    input to `boundaries` from the moment at which the layer before it made it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # autograd runs one thread for each accelerator
        self._entries: dict[int, _Entry] = {}
        # Deaths are queued and booked before the next birth. The weak references' callbacks may come from the garbage
        # collector at any moment, also while this very thread holds the lock; and no peak can fall between two births.
        self._dead: deque[int] = deque()
        self._resident: list[tuple[_Entry, int]] = []
        self._log: list[tuple[Context | None, _Entry, int]] = []

    def add(self, storage: torch.UntypedStorage, nbytes: int, context: Context) -> None:
        """A storage that has just been allocated, unless it is known already."""
        with self._lock:
            self._bury()
            entry = self._enter(storage, nbytes, context[0].component)
            if entry is not None:
                self._log.append((context, entry, nbytes))

    def own(self, storage: torch.UntypedStorage, nbytes: int, component: str) -> None:
        """Makes `component` the owner. A storage not seen before was there all along: it counts from the start."""
        with self._lock:
            self._bury()
            entry = self._entries.get(storage._cdata)
            if entry is not None:
                entry.component = component
            else:
                self._resident.append((self._enter(storage, nbytes, component), nbytes))

    def resize(self, storage: torch.UntypedStorage, nbytes: int, context: Context) -> None:
        """A storage whose size has changed; one that is not known is left alone."""
        with self._lock:
            self._bury()
            entry = self._entries.get(storage._cdata)
            if entry is not None and nbytes != entry.nbytes:
                self._log.append((context, entry, nbytes - entry.nbytes))
                entry.nbytes = nbytes

    def knows(self, storage: torch.UntypedStorage) -> bool:
        with self._lock:
            self._bury()
            return storage._cdata in self._entries

    def restart(self) -> None:
        """Forgets the past: what is alive now is resident from here on."""
        with self._lock:
            self._bury()
            self._resident = [(entry, entry.nbytes) for entry in self._entries.values()]
            self._log = []

    def report(self) -> PeakReport:
        with self._lock:
            self._bury()
            return _replay(self._resident, self._log)

    def moments(self) -> dict[tuple[str, str], Moment]:
        """By phase and what is at work (`Region.at_work`)."""
        with self._lock:
            self._bury()
            return _moments(self._resident, self._log)

    def _enter(self, storage: torch.UntypedStorage, nbytes: int, component: str) -> _Entry | None:
        key = storage._cdata
        if key in self._entries:
            return None
        entry = self._entries[key] = _Entry(component, nbytes)
        entry.reference = weakref.ref(storage, lambda _: self._dead.append(key))
        return entry

    def _bury(self) -> None:
        while self._dead:
            entry = self._entries.pop(self._dead.popleft())
            self._log.append((None, entry, -entry.nbytes))


class Runs:
    """`working` of each component: what is held within one uninterrupted run of one visit of a capped region."""

    def __init__(self, live: dict[str, int]):
        self.working = dict.fromkeys(COMPONENTS, 0)
        self.high = 0  # of the component at work, in its present run
        self._live, self._region, self._entry = live, None, 0

    def turn(self, region: Region | None) -> None:
        """From here on `region` is at work."""
        if region is self._region:
            return
        if self._region is not None and self._region.capped:
            name = self._region.component
            rise = self.high - max(self._entry, self._live[name])
            self.working[name] = max(self.working[name], rise)
        self._region = region
        self._entry = self.high = 0 if region is None else self._live[region.component]

    def rose(self, component: str, level: int) -> None:
        if self._region is not None and component == self._region.component:
            self.high = max(self.high, level)


def _replay(resident: Iterable[tuple[_Entry, int]], log: Iterable[tuple[Context | None, _Entry, int]]) -> PeakReport:
    live = dict.fromkeys(COMPONENTS, 0)
    for entry, nbytes in resident:
        live[entry.component] += nbytes
    total = peak = sum(live.values())
    at_peak, high, runs, phase = dict(live), dict(live), Runs(live), "resident"
    phase_totals, phase_highs = {phase: total}, {phase: dict(live)}
    for context, entry, delta in log:
        if context is not None:
            runs.turn(context[0])
            if context[1] != phase:
                phase = context[1]
                phase_totals[phase] = max(phase_totals.get(phase, 0), total)
                highs = phase_highs.setdefault(phase, {})
                for name, level in live.items():
                    highs[name] = max(highs.get(name, 0), level)
        owner = entry.component
        live[owner] += delta
        total += delta
        if delta > 0:
            high[owner] = max(high[owner], live[owner])
            phase_highs[phase][owner] = max(phase_highs[phase][owner], live[owner])
            phase_totals[phase] = max(phase_totals[phase], total)
            runs.rose(owner, live[owner])
            if total > peak:
                peak, at_peak = total, dict(live)
    runs.turn(None)
    components = {
        name: ComponentPeak(
            peak=high[name],
            at_peak=at_peak[name],
            working=runs.working[name],
            phases={phase: highs[name] for phase, highs in phase_highs.items()},
        )
        for name in COMPONENTS
    }
    return PeakReport(total=peak, components=components, phases=phase_totals, probe="storage")


def _moments(
    resident: Iterable[tuple[_Entry, int]], log: Iterable[tuple[Context | None, _Entry, int]]
) -> dict[tuple[str, str], Moment]:
    live = dict.fromkeys(COMPONENTS, 0)
    for entry, nbytes in resident:
        live[entry.component] += nbytes
    moments = {("resident", OTHER): Moment(dict(live), {"all along": dict(live)})}
    total, highest, visits = sum(live.values()), {}, _Visits()
    for context, entry, delta in log:
        before = dict(live) if context is not None else None
        if context is not None:
            visits.turn(context, live)
        live[entry.component] += delta
        total += delta
        visits.moved(live)
        if before is not None:
            key = context[1], context[0].at_work
            moment = moments.setdefault(key, Moment({}, {}))
            tops, now = highest.setdefault(key, {}), None
            for name, level in live.items():
                moment.highs[name] = max(moment.highs.get(name, 0), level, before[name])
                for of, height in ((name, (level,)), (f"{name} with layer", (level, live["layer"]))):
                    if height >= tops.get(of, (0,)):
                        now = now or dict(live)
                        moment.levels[f"{of}, last"] = now
                        if height > tops.get(of, ()):
                            tops[of], moment.levels[f"{of}, first"] = height, now
            if (total,) > tops.get(TOTAL, ()):
                tops[TOTAL], moment.levels[TOTAL] = (total,), now or dict(live)
    visits.turn(None, live)
    visits.tell(moments)
    return moments


class _Visits:
    """`OWN` of each moment: of the visits that rose at least half as much as any did, the one that came highest."""

    def __init__(self) -> None:
        self._context, self._low, self._rise, self._levels = None, 0, 0, {}
        # By moment, rises and what was alive then: of two visits, the one that is above the other in both.
        self._found: dict[tuple[str, str], list[tuple[int, int, dict[str, int]]]] = {}

    def turn(self, context: Context | None, live: dict[str, int]) -> None:
        """From here on the region of `context` is at work, in its phase."""
        if context == self._context:
            return
        if self._levels:
            region, phase = self._context
            rise, level = self._rise, self._levels[region.component]
            others = self._found.setdefault((phase, region.at_work), [])
            if not any(r >= rise and other >= level for r, other, _ in others):
                others[:] = [found for found in others if found[0] > rise or found[1] > level]
                others.append((rise, level, self._levels))
        if context is not None and (self._context is None or context[0] is not self._context[0]):
            self._low = live[context[0].component]  # of the whole visit, in whatever phases
        self._context, self._rise, self._levels = context, 0, {}

    def moved(self, live: dict[str, int]) -> None:
        if self._context is None:
            return
        level = live[self._context[0].component]
        self._low = min(self._low, level)
        if level - self._low > self._rise:
            self._rise, self._levels = level - self._low, dict(live)

    def tell(self, moments: dict[tuple[str, str], Moment]) -> None:
        for key, visits in self._found.items():
            most = max(rise for rise, _, _ in visits)
            moments[key].levels[OWN] = max((v for v in visits if 2 * v[0] >= most), key=lambda v: v[1])[2]
