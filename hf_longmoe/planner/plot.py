"""A plan as curves over the context length. matplotlib is imported on first use: it comes with the extra `plot`."""

from __future__ import annotations

import os

from hf_longmoe.planner.caps import MOST
from hf_longmoe.planner.plan import Plan
from hf_longmoe.sizes import format_tokens

__all__ = ["curves", "plot_plan"]

_SHOWN = {"dispatch": "#2f6db5", "vocab": "#d08a2e", "boundaries": "#4c9a6a", "optimizer": "#a2559b"}
_TOTAL = "#444444"
_SHORTEST = 4096


def curves(plan: Plan) -> tuple[list[int], list[dict[str, int]], list[dict[str, int]]]:
    """
    Lengths, twice as long each, to beyond the plan's and what fits; at each, unbounded and scheduled, bytes of the
    four components and of the total.
    """
    farthest = max(plan.layout.seq_len, plan.longest_scheduled or 0, 4 * _SHORTEST)
    shortest = max(_SHORTEST, plan.layout.cp_size)
    lengths = [shortest]
    while lengths[-1] < farthest:
        lengths.append(2 * lengths[-1])
    before, after = [], []
    for length in lengths:
        for found, prediction in zip((before, after), plan.at(length), strict=True):
            found.append({name: prediction.components[name] for name in _SHOWN} | {"total": prediction.total})
    return lengths, before, after


def plot_plan(path: str | os.PathLike, plan: Plan) -> None:
    """
    Draws the four peaks and the total over the context length, unbounded dashed and scheduled solid, the device's
    limit and the first death.

    Arguments:
        path: the PNG to write.

    Raises:
        `ImportError`: matplotlib is missing; the message names the extra that brings it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'hf-longmoe[plot]'.") from error

    lengths, before, after = curves(plan)
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, colour in {**_SHOWN, "total": _TOTAL}.items():
        for found, style, way in ((before, "--", "unbounded"), (after, "-", "scheduled")):
            sizes = [at[name] / 2**30 for at in found]
            if any(sizes):
                label = name if way == "scheduled" else None
                axes.plot(lengths, sizes, style, color=colour, label=label, linewidth=2.2 if name == "total" else 1.4)
    if plan.limit is not None:
        axes.axhline(plan.limit / 2**30, color="#c0392b", linewidth=1)
        axes.annotate("device", (lengths[0], plan.limit / 2**30), color="#c0392b", va="bottom")
        component, length = plan.dies_first() or ("", MOST)
        if length <= lengths[-1]:
            axes.plot([length], [plan.limit / 2**30], "x", color="#c0392b", markersize=11, markeredgewidth=2.5)
            axes.annotate(
                f"{component} dies first, {format_tokens(length)}",
                (length, plan.limit / 2**30),
                xytext=(6, 10),
                textcoords="offset points",
                color="#c0392b",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_ylim(bottom=max(2**-6, min(at["total"] for at in after) / 2**34))
    axes.set_xticks(lengths, [format_tokens(length) for length in lengths])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("GiB on each rank")
    axes.set_title(f"{plan.shape.model_type}, {plan.layout.world_size} ranks: unbounded dashed, scheduled solid")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=len(axes.get_legend_handles_labels()[1]), frameon=False)
    figure.savefig(path, dpi=150)
