"""A plan for people: tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from hf_longmoe.peaks.region import COMPONENTS
from hf_longmoe.peaks.report import PeakReport
from hf_longmoe.planner.plan import ASSUMED, NOT_COUNTED, Plan
from hf_longmoe.planner.predict import Prediction
from hf_longmoe.planner.recipe import launch_line, python_lines
from hf_longmoe.planner.verification import Row, Verification, compare, off
from hf_longmoe.sizes import format_bytes, format_tokens

__all__ = ["print_comparison", "print_plan", "print_verification"]

_OFF = 0.1  # of a prediction: routing is never as even as predicted, and collectives are only estimated


def console_for(file: TextIO | None) -> Console:
    """Of a terminal, or plain ASCII of 120 columns."""
    console = Console(file=file, highlight=False)
    if console.is_terminal:
        return console
    return Console(file=console.file, highlight=False, width=120, color_system=None, emoji=False)


def print_plan(plan: Plan, *, device_memory: str | None = None, file: TextIO | None = None) -> None:
    """
    Arguments:
        device_memory (`str`, *optional*): as the user wrote it, for the lines that use the plan.
        file (*optional*): where to; standard output by default. Without a terminal behind it: plain ASCII.
    """
    console = console_for(file)
    console.print(_title(plan), style="bold")
    console.print(_table(plan, console))
    for sentence in _sentences(plan):
        console.print(sentence, soft_wrap=True)
    console.print("\nTo use it:", style="bold")
    for line in (*python_lines(plan, device_memory), "", launch_line(plan)):
        console.print(f"  {line}".rstrip(), soft_wrap=True, markup=False)
    console.print("\nAssumed", style="bold")
    for text in ASSUMED:
        console.print(f"  - {text}", soft_wrap=True)
    console.print("Not counted", style="bold")
    for text in NOT_COUNTED:
        console.print(f"  - {text}", soft_wrap=True)


def print_verification(found: Verification, *, file: TextIO | None = None) -> None:
    """Predicted, measured by fake steps, and the difference, for each component."""
    depths = " and ".join(map(str, found.depths))
    for way, rows in found.rows.items():
        _print_rows(rows, f"One rank alone, {way}: measured by fake steps of {depths} layers", file)
    console_for(file).print(
        "One rank alone: nothing is divided by FSDP2, gathered, exchanged or offloaded, as it is above."
    )


def print_comparison(predicted: Prediction, measured: PeakReport, *, file: TextIO | None = None) -> None:
    """A run's peaks beside what was predicted for it; then, in words, which are off by more than a tenth."""
    rows = compare(predicted, measured)
    _print_rows(rows, "Predicted, and measured in this run", file)
    found = off(rows, _OFF)
    console_for(file).print(
        f"Off its prediction by more than {_OFF:.0%}: {', '.join(found)}."
        if found
        else f"Every component is within {_OFF:.0%} of its prediction."
    )


def _print_rows(rows: Sequence[Row], title: str, file: TextIO | None) -> None:
    console = console_for(file)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII2)
    table.add_column("component")
    for heading in ("predicted", "measured", "difference"):
        table.add_column(heading, justify="right")
    for row in rows:
        sizes = (format_bytes(row.predicted), format_bytes(row.measured), f"{row.difference:.2%}")
        table.add_row(row.component, *sizes, style="bold" if row.component == "total" else None)
    console.print(f"\n{title}", style="bold")
    console.print(table)


def _title(plan: Plan) -> str:
    layout, shape = plan.layout, plan.shape
    ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
    parts = [f"{name} {size}" for name, size in (("ep", layout.ep_size), ("cp", layout.cp_size)) if size > 1]
    if layout.fsdp_size > 1:
        parts.append(f"fsdp {layout.fsdp_size}")
    spread = f" ({', '.join(parts)})" if parts else ""
    return (
        f"{shape.model_type}, {_count(shape.parameters)} parameters, {format_tokens(layout.seq_len)} tokens on"
        f" {ranks}{spread}: predicted peaks of each rank"
    )


def _table(plan: Plan, console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII2)
    table.add_column("component")
    for heading in ("unbounded", "at its peak", "scheduled", "at its peak", "on the host"):
        table.add_column(heading, justify="right")
    before, after = plan.unbounded, plan.scheduled
    for name in COMPONENTS:
        if not (before.components[name] or after.components[name]):
            continue
        host = format_bytes(after.host[name]) if name in after.host else ""
        sizes = (before.components[name], before.at_peak[name], after.components[name], after.at_peak[name])
        table.add_row(name, *map(format_bytes, sizes), host, style="bold" if name == before.largest else None)
    table.add_section()
    host = format_bytes(sum(after.host.values())) if after.host else ""
    table.add_row("total", "", format_bytes(before.total), "", format_bytes(after.total), host, style="bold")
    return table


def _sentences(plan: Plan) -> Iterator[str]:
    before, after = plan.unbounded, plan.scheduled
    moments = (f"in {found.phase} ({found.at_work})" for found in (before, after))
    yield f"The highest moment is {' unbounded, and '.join(moments)} scheduled."
    yield f"Whatever the routing, the scheduled total stays within {format_bytes(plan.at_most)}."
    if plan.limit is None:
        return
    limit = format_bytes(plan.limit)
    dies = plan.dies_first()
    first = "nothing" if dies is None else f"{dies[0]}, at {format_tokens(dies[1])} tokens"
    if before.total > plan.limit:
        yield f"Unbounded does not fit in {limit}. What dies first is {first}."
    else:
        yield f"Unbounded fits in {limit}. What would die first is {first}."
    longest = [
        "none" if tokens is None else f"{format_tokens(tokens)} tokens"
        for tokens in (plan.longest_unbounded, plan.longest_scheduled)
    ]
    yield f"The longest context that fits: {longest[0]} unbounded, {longest[1]} scheduled."
    if not plan.fits:
        yield "The caps given do not fit; without caps of your own, some are chosen."
    elif plan.config_is_empty:
        yield "No schedule is needed: no caps."


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.4g} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"
