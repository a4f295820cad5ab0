"""Peak reports as a bar chart (PNG). matplotlib is imported on first use: it comes with the extra `plot`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hf_longmoe.peaks.report import PeakReport
from hf_longmoe.peaks.table import shown_components
from hf_longmoe.sizes import format_bytes

__all__ = ["plot_reports"]

_COLOURS = ("#8c9bab", "#2f6db5", "#d08a2e", "#4c9a6a")


def plot_reports(path: str | os.PathLike, reports: Mapping[str, PeakReport]) -> None:
    """
    Draws the own peak of each component, and the total, as one bar for each report.

    Arguments:
        path: the PNG to write.
        reports (`dict[str, PeakReport]`): by label, e.g. `{"stock": before, "patched": after}`.

    Raises:
        `ImportError`: matplotlib is missing; the message names the extra that brings it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'hf-longmoe[plot]'.") from error

    names = [*shown_components(*reports.values()), "total"]
    bars = {
        label: [report.total if name == "total" else report.components[name].peak for name in names]
        for label, report in reports.items()
    }
    unit, suffix = _unit(max(map(max, bars.values())))
    # A Figure of its own, not pyplot: leaves the caller's backend and open figures alone.
    figure = Figure(figsize=(8, 1.2 + len(names) * (0.22 + 0.24 * len(bars))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    height = 0.8 / len(bars)
    for i, (label, sizes) in enumerate(bars.items()):
        places = [row + (i - (len(bars) - 1) / 2) * height for row in range(len(names))]
        drawn = axes.barh(
            places, [size / unit for size in sizes], height * 0.92, label=label, color=_COLOURS[i % len(_COLOURS)]
        )
        axes.bar_label(drawn, [format_bytes(size) for size in sizes], padding=3, fontsize=8, color="#444444")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axhline(len(names) - 1.5, color="#cccccc", linewidth=0.8)
    axes.set_xlabel(f"peak, {suffix}")
    axes.margins(x=0.14)
    axes.set_title("Peak memory of a training step, per component", loc="left", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if len(bars) > 1:
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(bars), fontsize=9)
    figure.savefig(path, dpi=150)


def _unit(largest: int) -> tuple[int, str]:
    for power, suffix in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return 1024**power, suffix
    return 1, "B"
