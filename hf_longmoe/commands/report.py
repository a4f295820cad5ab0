"""`hf-longmoe report`: what `ComponentPeakCallback` left in a run's folder, as a table, JSON or a plot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_longmoe.commands import UsageError
from hf_longmoe.sizes import format_bytes

if TYPE_CHECKING:
    from hf_longmoe.peaks import PeakReport

__all__ = ["add_arguments", "run"]

_PEAKS, _EXPERTS = "peaks.json", "experts.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run's folder with peaks.json, or that file")
    parser.add_argument(
        "other", type=Path, metavar="OTHER_DIR", nargs="?", help="another run: what it saves against the first"
    )
    parser.add_argument("--json", action="store_true", help="print the reports in the format of peaks.json")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the peaks as bars to FILE, a PNG")


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        `UsageError`: a folder or file that is not there or not a peaks file, or a plot that cannot be written.
    """
    if arguments.plot is not None:
        _check_plot(arguments.plot)
    files = [_peaks_file(place) for place in (arguments.run, arguments.other) if place is not None]
    names = _names(files) if len(files) == 2 else [""]
    reports: dict[str, PeakReport] = {}
    for name, file in zip(names, files, strict=True):
        loaded = _load(file)
        for label, report in loaded.items():
            # One report of a run goes by the run's name: its own label is "this run", in every file.
            reports[label if not name else name if len(loaded) == 1 else f"{name}: {label}"] = report

    if arguments.plot is not None:
        _plot(arguments.plot, reports)
    if arguments.json:
        _print_json(reports)
    else:
        _print_table(reports)
        for name, file in zip(names, files, strict=True):
            line = _experts_line(file.with_name(_EXPERTS)) if file.name == _PEAKS else ""
            if line:
                print(f"{name}: {line}" if name else line)
    if arguments.plot is not None:
        print(f"Plot: {arguments.plot}", file=sys.stderr if arguments.json else sys.stdout)
    return 0


# -- reading ---------------------------------------------------------------------------------------------------------
def _peaks_file(place: Path) -> Path:
    if not place.exists():
        raise UsageError(f"{place}: no such folder or file.")
    if not place.is_dir():
        return place
    file = place / _PEAKS
    if not file.exists():
        near = [str(found.parent) for found in sorted(place.glob(f"*/{_PEAKS}"))[:4]]
        hint = f" There is one in {', '.join(near)}." if near else ""
        raise UsageError(f"{place}: no {_PEAKS} in it; ComponentPeakCallback writes it when training ends.{hint}")
    return file


def _load(file: Path) -> dict[str, PeakReport]:
    from hf_longmoe.peaks import load_reports

    try:
        reports = load_reports(file)
        numbers = [number for report in reports.values() for number in report.to_row()]
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not a text file; ComponentPeakCallback writes {_PEAKS}.") from error
    except ValueError as error:
        raise UsageError(" ".join(str(error).split())) from error
    except (AttributeError, KeyError, TypeError) as error:
        raise UsageError(f"{file}: a damaged peaks file ({type(error).__name__}: {error}).") from error
    if not numbers or any(type(number) is not int for number in numbers):
        raise UsageError(f"{file}: a damaged peaks file (not whole numbers of bytes, or no report at all).")
    return reports


def _names(files: list[Path]) -> list[str]:
    """Two runs by as much of the end of their paths as tells them apart."""
    runs = [(file.parent if file.name == _PEAKS else file).resolve() for file in files]
    if runs[0] == runs[1]:
        raise UsageError(f"{files[1]}: both are the same run.")
    depth = 1
    while runs[0].parts[-depth:] == runs[1].parts[-depth:]:
        depth += 1
    return [str(Path(*run.parts[-depth:])) for run in runs]


# -- showing ---------------------------------------------------------------------------------------------------------
def _print_table(reports: Mapping[str, PeakReport]) -> None:
    from rich.markup import escape

    from hf_longmoe.peaks.table import print_reports

    print_reports({escape(label): report for label, report in reports.items()})
    labels = list(reports)
    if len(labels) == 1:
        (report,) = reports.values()
        held = format_bytes(report.components[report.largest].at_peak)
        print(f"Most of the total peak: {report.largest}, {held} of {format_bytes(report.total)}.")
    if len(labels) > 2:
        print(f"Saved: {labels[-1]} against {labels[0]}.")
    if len({report.probe for report in reports.values()}) > 1:
        probes = ", ".join(f"{label} by the {report.probe} probe" for label, report in reports.items())
        print(f"Not measured alike: {probes}. Only the allocator sees scratch inside kernels.")


def _print_json(reports: Mapping[str, PeakReport]) -> None:
    from hf_longmoe.peaks.report import FORMAT_VERSION

    values: dict[str, Any] = {"format": "hf-longmoe peaks", "version": FORMAT_VERSION, "unit": "bytes"}
    values["reports"] = {label: report.to_dict() for label, report in reports.items()}
    print(json.dumps(values, indent=2))


def _experts_line(file: Path) -> str:
    """The worst layer and step of each number of experts.json; empty where there is none."""
    if not file.exists():
        return ""
    try:
        steps = json.loads(file.read_text(encoding="utf-8"))
        layers = [layer for step in steps.values() for layer in step.values()]
        if not layers:
            return ""
        worst = {name: max(layer[name] for layer in layers) for name in layers[0]}
        return (
            f"Expert parallelism: at most {worst['waves']:.0f} waves of {worst['row_budget']:.0f} rows; received at"
            f" most {worst['largest_receive']:.0f}, sent {worst['largest_send']:.0f}. Largest load over the mean"
            f" {worst['imbalance']:.2f}, after lending {worst['imbalance_after']:.2f} (at most {worst['lent']:.0f}"
            f" lent, {format_bytes(worst['lent_bytes'])} of weights a layer)."
        )
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        print(f"{file}: not as ComponentPeakCallback writes it; left out.", file=sys.stderr)
        return ""


# -- the plot --------------------------------------------------------------------------------------------------------
def _check_plot(file: Path) -> None:
    if file.suffix.lower() != ".png":
        raise UsageError(f"--plot {file}: a PNG is written; end the name in .png.")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--plot {file}: there is no folder {file.absolute().parent}; make it first.")


def _plot(file: Path, reports: Mapping[str, PeakReport]) -> None:
    from hf_longmoe.peaks.plot import plot_reports

    try:
        plot_reports(file, reports)
    except ImportError as error:
        raise UsageError(f"--plot {file}: {error}") from error
    except OSError as error:
        raise UsageError(f"--plot {file}: cannot be written ({error.strerror}).") from error
