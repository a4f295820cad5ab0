"""`PeakReport`: the peaks of one or more training steps, as plain integers of bytes."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from hf_longmoe.peaks.region import COMPONENTS, PHASES

__all__ = ["FORMAT_VERSION", "ComponentPeak", "PeakReport", "load_reports", "save_reports"]

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ComponentPeak:
    """
    One component, in bytes.

    Arguments:
        peak (`int`): the most bytes of this component alive at once.
        at_peak (`int`): its bytes at the moment when the total was highest.
        working (`int`): the most bytes that it held at once within one visit of its regions, beyond the larger of what
            it held when the visit began and what was left when it ended. Inputs, outputs and what is kept for backward
            are left out, so this is the number that a schedule's cap bounds.
        phases (`dict[str, int]`): per phase of `PHASES` that occurred, the most bytes alive at once during it.
    """

    peak: int
    at_peak: int
    working: int
    phases: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class PeakReport:
    """
    The peaks of a step, or the highest of several steps and ranks.

    Arguments:
        total (`int`): the most bytes alive at once. The components' `at_peak` sum to it exactly.
        components (`dict[str, ComponentPeak]`): one entry for each of `COMPONENTS`.
        phases (`dict[str, int]`): per phase that occurred, the most bytes alive at once during it.
        probe (`str`): `"storage"` or `"allocator"`.
        steps (`int`): how many training steps it covers.
        ranks (`int`): how many ranks it covers.
    """

    total: int
    components: Mapping[str, ComponentPeak]
    phases: Mapping[str, int]
    probe: str
    steps: int = 1
    ranks: int = 1

    @property
    def largest(self) -> str:
        """The component that holds most of the total peak: where memory ends first."""
        return max(COMPONENTS, key=lambda name: self.components[name].at_peak)

    def merge(self, other: PeakReport, over: str = "steps") -> PeakReport:
        """
        The maximum of both. `at_peak` is taken whole from the report with the higher total (from `self` on a tie), so
        that it still sums to the total.

        Arguments:
            other (`PeakReport`): another report.
            over (`str`, defaults to `"steps"`): `"steps"` or `"ranks"`: which of the two counts adds up. The other
                becomes the larger of both.
        """
        if over not in ("steps", "ranks"):
            raise ValueError(f"over={over!r} is unknown; choose one of steps, ranks.")
        top = self if self.total >= other.total else other
        components = {}
        for name in COMPONENTS:
            a, b = self.components[name], other.components[name]
            components[name] = ComponentPeak(
                peak=max(a.peak, b.peak),
                at_peak=top.components[name].at_peak,
                working=max(a.working, b.working),
                phases=_larger(a.phases, b.phases),
            )
        counts = {"steps": max(self.steps, other.steps), "ranks": max(self.ranks, other.ranks)}
        counts[over] = getattr(self, over) + getattr(other, over)
        phases = _larger(self.phases, other.phases)
        return PeakReport(total=top.total, components=components, phases=phases, probe=self.probe, **counts)

    def to_row(self) -> list[int]:
        """The same numbers as a list whose length does not depend on the report: for a collective. -1 is "absent"."""
        row = [self.total, self.steps, self.ranks, *(self.phases.get(phase, -1) for phase in PHASES)]
        for name in COMPONENTS:
            part = self.components[name]
            row += [part.peak, part.at_peak, part.working, *(part.phases.get(phase, -1) for phase in PHASES)]
        return row

    @classmethod
    def from_row(cls, row: list[int], probe: str) -> PeakReport:
        """The inverse of `to_row`; `probe` is the one field that is not a number."""
        numbers = iter(row)

        def take_phases() -> dict[str, int]:
            return {phase: number for phase in PHASES if (number := next(numbers)) >= 0}

        total, steps, ranks = (next(numbers) for _ in range(3))
        phases = take_phases()
        components = {
            name: ComponentPeak(peak=next(numbers), at_peak=next(numbers), working=next(numbers), phases=take_phases())
            for name in COMPONENTS
        }
        return cls(total=total, components=components, phases=phases, probe=probe, steps=steps, ranks=ranks)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, strings and integers. `from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PeakReport:
        components = {name: ComponentPeak(**part) for name, part in values["components"].items()}
        return cls(**{**values, "components": components})


def merge_ranks(reports: Iterable[PeakReport]) -> PeakReport:
    """The maximum over ranks; the components at the peak are those of the rank whose total is highest."""
    return reduce(lambda a, b: a.merge(b, over="ranks"), reports)


def save_reports(path: str | os.PathLike, reports: Mapping[str, PeakReport]) -> None:
    """
    Writes reports as JSON (schema: `hf_longmoe.peaks.schema.PEAKS_SCHEMA`).

    Arguments:
        path: the file.
        reports (`dict[str, PeakReport]`): by label, in the order in which tables and plots show them, e.g.
            `{"stock": before, "patched": after}`.
    """
    values = {"format": "hf-longmoe peaks", "version": FORMAT_VERSION, "unit": "bytes"}
    values["reports"] = {label: report.to_dict() for label, report in reports.items()}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=2)
        file.write("\n")


def load_reports(path: str | os.PathLike) -> dict[str, PeakReport]:
    """
    Reads what `save_reports` wrote.

    Raises:
        `ValueError`: not such a file, or one of a later version; the message names the file.
    """
    where = os.fspath(path)
    with open(path, encoding="utf-8") as file:
        try:
            values = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error}).") from error
    if not isinstance(values, dict) or values.get("format") != "hf-longmoe peaks":
        raise ValueError(f"{where}: not a peaks file; ComponentPeakCallback writes one as peaks.json.")
    if values["version"] != FORMAT_VERSION:
        raise ValueError(
            f"{where}: peaks file of version {values['version']}, this version of hf-longmoe reads {FORMAT_VERSION}."
        )
    return {label: PeakReport.from_dict(report) for label, report in values["reports"].items()}


def _larger(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {phase: max(a.get(phase, 0), b.get(phase, 0)) for phase in PHASES if phase in a or phase in b}
