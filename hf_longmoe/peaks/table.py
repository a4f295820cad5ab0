"""Peak reports as a table for people: one report in full, several side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from hf_longmoe.peaks.region import COMPONENTS, PHASES
from hf_longmoe.peaks.report import PeakReport
from hf_longmoe.sizes import format_bytes

__all__ = ["print_reports", "shown_components"]


def print_reports(
    reports: Mapping[str, PeakReport], *, caps: Mapping[str, int] | None = None, file: TextIO | None = None
) -> None:
    """
    Prints one report in full, or several side by side with what the last saves against the first.

    Arguments:
        reports (`dict[str, PeakReport]`): by label.
        caps (`dict[str, int]`, *optional*): bytes by component; shown beside one report.
        file (*optional*): where to; standard output by default. Without a terminal behind it: plain ASCII.
    """
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, highlight=False, width=120, color_system=None, emoji=False)
    title, table = _full(*reports.items(), caps or {}) if len(reports) == 1 else _side_by_side(reports)
    table.box = box.SIMPLE_HEAD if console.is_terminal else box.ASCII2
    console.print(title, style="bold")
    console.print(table)


def shown_components(*reports: PeakReport) -> list[str]:
    """Those that hold anything in any of the reports, in their fixed order."""
    return [name for name in COMPONENTS if any(report.components[name].peak for report in reports)]


def _title(report: PeakReport) -> str:
    steps = f"{report.steps} step" + "s" * (report.steps > 1)
    return f"highest of {steps}" + (f" and {report.ranks} ranks" if report.ranks > 1 else "")


def _full(item: tuple[str, PeakReport], caps: Mapping[str, int]) -> tuple[str, Table]:
    label, report = item
    table = Table()
    table.add_column("component")
    phases = [phase for phase in PHASES if phase in report.phases and phase != "resident"]
    for heading in ("own peak", "at total peak", "working", *(["cap"] if caps else []), *phases):
        table.add_column(heading, justify="right")
    for name in shown_components(report):
        part = report.components[name]
        cap = [format_bytes(caps[name]) if name in caps else ""] if caps else []
        by_phase = [format_bytes(part.phases[phase]) if phase in part.phases else "" for phase in phases]
        sizes = [format_bytes(number) for number in (part.peak, part.at_peak, part.working)]
        table.add_row(name, *sizes, *cap, *by_phase, style="bold" if name == report.largest else None)
    table.add_section()
    total = [format_bytes(report.total)] * 2 + [""] * (2 if caps else 1)
    table.add_row("total", *total, *(format_bytes(report.phases[phase]) for phase in phases), style="bold")
    return f"Peak bytes, {label} ({_title(report)})", table


def _side_by_side(reports: Mapping[str, PeakReport]) -> tuple[str, Table]:
    table = Table()
    table.add_column("component")
    for label in reports:
        table.add_column(label, justify="right")
    table.add_column("saved", justify="right")
    rows = {name: [r.components[name].peak for r in reports.values()] for name in shown_components(*reports.values())}
    for name, peaks in rows.items():
        table.add_row(name, *map(format_bytes, peaks), _saved(peaks[0], peaks[-1]))
    totals = [report.total for report in reports.values()]
    table.add_section()
    table.add_row("total", *map(format_bytes, totals), _saved(totals[0], totals[-1]), style="bold")
    titles = {_title(report): None for report in reports.values()}
    return f"Own peak of each component ({'; '.join(titles)})", table


def _saved(before: int, after: int) -> str:
    return f"{100 * (1 - after / before):.1f}%" if before else ""
