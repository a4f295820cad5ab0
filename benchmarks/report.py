"""The result of a benchmark: its JSON, its table, and which limits it missed."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from benchmarks.harness import cores
from hf_longmoe.sizes import format_bytes

__all__ = ["SCHEMA", "environment", "missed", "table"]

_NUMBER = {"type": ["number", "null"]}
_CASE = {
    "case": {"type": "string"},
    "baseline_peak_bytes": {"type": "integer"},
    "peak_bytes": {"type": "integer"},
    "peak_saved": {"type": "number", "maximum": 1},
    "cpu_ratio": _NUMBER,
    "wall_ratio": _NUMBER,
    "error": {"type": "number", "minimum": 0},
    "baseline_error": {"type": "number", "minimum": 0},
    "gate": {"type": "boolean"},
}
_ENVIRONMENT = {
    "python": {"type": "string"},
    "torch": {"type": "string"},
    "transformers": {"type": "string"},
    "cpu": {"type": "string"},
    "cores": {"type": "integer", "minimum": 1},
    "threads": {"type": "integer", "minimum": 1},
    "date": {"type": "string"},
}
_AT_LEAST = ("peak_saved", "reach", "throughput_ratio")  # the other limits are upper ones
# Every benchmark of the project writes this; a case may have more keys (limits, seconds, peaks by the system).
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "environment": {"type": "object", "properties": _ENVIRONMENT, "required": list(_ENVIRONMENT)},
        "cases": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {**_CASE, "limits": {"type": "object", "additionalProperties": {"type": "number"}}},
                "required": list(_CASE),
            },
        },
    },
    "required": ["name", "environment", "cases"],
    "additionalProperties": False,
}


def environment(threads: int) -> dict[str, Any]:
    """Where the numbers come from. `load_average` (one minute, at the start) tells whether the machine was busy."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "cpu": _cpu(),
        "cores": cores(),
        "threads": threads,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def missed(entry: dict[str, Any]) -> list[str]:
    """The limits that a case's entry misses, each in words."""
    found = []
    for name, limit in entry["limits"].items():
        value, at_least = entry[name], name in _AT_LEAST
        if value is None:
            found.append(f"{entry['case']}: {name} was not measured")
        elif value < limit if at_least else value > limit:
            wanted = f"at {'least' if at_least else 'most'} {limit:.10g}"
            found.append(f"{entry['case']}: {name} is {value:.10g}, wanted {wanted}")
    return found


def table(result: dict[str, Any]) -> Table:
    where = result["environment"]
    device = where.get("device", where["cpu"])
    view = Table(
        title=f"{result['name']}: {device}, {where['threads']} threads, torch {where['torch']}",
        caption="Peaks: beyond input, output, parameters and all their gradients; below, by the operating system. "
        "Ratios: ours / stock. Errors: largest, relative to float64, or to what the JSON names. "
        "Gate: whether the case must meet its limits.",
        box=SIMPLE,
        show_lines=True,
    )
    view.add_column("case", min_width=24)
    names = ["stock peak\n(system)", "peak\n(system)", "saved", "CPU\nratio", "wall\nratio", "error\n(stock)", "gate"]
    for name in names:
        view.add_column(name, justify="right", no_wrap=True)
    for entry in result["cases"]:
        gate = "" if not entry["gate"] else "[red]missed[/]" if missed(entry) else "[green]met[/]"
        view.add_row(
            entry["case"],
            _peak(entry["baseline_peak_bytes"], entry["baseline_system_peak_bytes"]),
            _peak(entry["peak_bytes"], entry["system_peak_bytes"]),
            f"{entry['peak_saved']:.1%}",
            _ratio(entry["cpu_ratio"]),
            _ratio(entry["wall_ratio"]),
            f"{entry['error']:.1e}\n({entry['baseline_error']:.1e})",
            gate,
        )
    return view


def _peak(own: int, by_system: int | None) -> str:
    return format_bytes(own) if by_system is None else f"{format_bytes(own)}\n({format_bytes(by_system)})"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"
