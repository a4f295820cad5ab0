"""
The longest context of a training step within a budget of device memory: stock Transformers against all four schedules.

Both sides train the same Mixtral in float32 with AdamW and non-reentrant activation checkpointing, on ranks that
divide model (FSDP2) and experts (expert parallelism), each with a sequence of its own, so that tokens are those of a
rank. Stock is the better of two: with activations kept, and with its own offloading of them. The budget is for the
bytes that the probe counts on the worst rank, and what is offloaded is not among them (see `end_to_end_side`). Every
reach is that of a step that was really run; what the steps took is in the JSON.

Tokens per CPU second are compared at stock's reach, on the host as it is: without a device there are no copies.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from benchmarks import report
from benchmarks.end_to_end_search import Found, search
from benchmarks.end_to_end_side import SCHEDULES, EndToEndModel, Peak, Side, SideSizes
from benchmarks.processes import processes
from hf_longmoe.sizes import format_bytes, parse_bytes

__all__ = ["SCHEMA", "THREADS", "EndToEndCase", "cases", "measure", "table"]

THREADS = 1
_TIME_OUT = 7200  # seconds that one step may take
_COUNT, _NUMBER = {"type": "integer", "minimum": 0}, {"type": ["number", "null"]}
_STEP = {
    "type": "object",
    "properties": {"tokens": _COUNT, "peak_bytes": _COUNT},
    "required": ["tokens", "peak_bytes"],
}
_CASE = {
    "case": {"type": "string"},
    "ranks": {"type": "integer", "minimum": 1},
    "budget_bytes": _COUNT,
    "baseline_reach": _COUNT,
    "our_reach": _COUNT,
    "reach": {"type": "number", "minimum": 0},
    "throughput_ratio": _NUMBER,
    "loss_difference": _NUMBER,
    "without": {"type": "object", "additionalProperties": _COUNT},
    "confirmed": {"type": "object", "additionalProperties": _STEP},
    "gate": {"type": "boolean"},
    "limits": {"type": "object", "additionalProperties": {"type": "number"}},
}
SCHEMA = {
    **report.SCHEMA,
    "properties": {
        **report.SCHEMA["properties"],
        "cases": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "object", "properties": _CASE, "required": list(_CASE)},
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class EndToEndCase:
    """
    One row of the table.

    Arguments:
        name (`str`): the model, the ranks and the budget.
        model (`EndToEndModel`): what is trained.
        ranks (`int`): processes of a side.
        budget (`str`): of device memory, a rank.
        caps (`dict[str, str]`): `dispatch`, `vocab`, `bucket` of ours.
        limits (`dict[str, float]`): `reach` and `throughput_ratio` at least, `loss_difference` at most.
        gate (`bool`): whether a missed limit fails the command.
        start (`int`): tokens of the shortest step of the search.
        ablation (`bool`, defaults to `False`): ours without each schedule too, and no throughput.
    """

    name: str
    model: EndToEndModel
    ranks: int
    budget: str
    caps: dict[str, str]
    limits: dict[str, float] = field(default_factory=dict)
    gate: bool = False
    start: int = 256
    ablation: bool = False
    grows_from: None = None

    def sizes(self, **values: Any) -> SideSizes:
        return SideSizes(model=self.model, ranks=self.ranks, **self.caps, **values)


@dataclass(frozen=True)
class _OneSide:
    """What `processes` is given: `name`, `ranks`, and `sizes`, of which each process builds its own."""

    name: str
    ranks: int
    sizes: SideSizes


def cases(quick: bool) -> list[EndToEndCase]:
    """`quick`: tiny models on 1 and 2 ranks, without limits on reach and time."""
    if quick:
        tiny = EndToEndModel(hidden=32, width=32, layers=4, experts=4, top_k=2, vocab=2048)
        caps = {"dispatch": "256KiB", "vocab": "256KiB", "bucket": "64KiB"}
        return [
            EndToEndCase(
                name=f"{'shares' if ablation else 'reach'}: tiny, {_on(ranks)}, {budget}",
                model=tiny,
                ranks=ranks,
                budget=budget,
                caps=caps,
                limits={} if ablation else {"loss_difference": 1e-5},
                start=64,
                ablation=ablation,
            )
            for ranks, budget, ablation in ((1, "5MiB", False), (1, "5MiB", True), (2, "4MiB", False))
        ]
    balanced = EndToEndModel(hidden=128, width=256, layers=8, experts=8, top_k=4, vocab=4096)
    deep = EndToEndModel(hidden=64, width=64, layers=16, experts=8, top_k=2, vocab=8192)
    # Budgets: of which stock needs about all for some thousand tokens.
    kinds = {
        "balanced": (balanced, ("16MiB", "16MiB"), {1: "144MiB", 2: "104MiB", 4: "84MiB"}, 8.0),
        "boundaries and vocabulary": (deep, ("8MiB", "8MiB"), {1: "136MiB", 2: "124MiB", 4: "117MiB"}, 32.0),
    }
    found = []
    for kind, (model, (dispatch, vocab), budgets, reach) in kinds.items():
        caps = {"dispatch": dispatch, "vocab": vocab, "bucket": "1MiB"}
        cases_of_it = [
            EndToEndCase(
                name=f"reach: {kind}, {_on(ranks)}, {budget}, {_label(model)}",
                model=model,
                ranks=ranks,
                budget=budget,
                caps=caps,
                limits={"reach": reach, "throughput_ratio": 0.95, "loss_difference": 1e-5},
                gate=True,
            )
            for ranks, budget in budgets.items()
        ]
        first = cases_of_it[0]
        shares = first.name.replace("reach", "shares", 1)
        found += [*cases_of_it, replace(first, name=shares, ablation=True, gate=False, limits={})]
    return found


def _on(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _label(model: EndToEndModel) -> str:
    return f"H {model.hidden}, I {model.width}, L {model.layers}, E {model.experts}, k {model.top_k}, V {model.vocab}"


# -- one case --------------------------------------------------------------------------------------------------------
def measure(
    case: EndToEndCase, earlier: dict[str, dict], pairs: int, threads: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """A case's entry in the JSON."""
    limit = parse_bytes(case.budget, "budget")

    def reach(label: str, sizes: SideSizes, times: int = 1, **how: Any) -> tuple[Found, dict[int, Peak]]:
        steps: dict[int, Peak] = {}
        one = _OneSide(case.name, case.ranks, sizes)
        with processes(one, label, threads, _TIME_OUT) as call:

            def peak(tokens: int) -> int:
                say(f"{label}: a step of {tokens:,} tokens")
                steps[tokens] = max(call(_peak, tokens), key=lambda rank: rank.nbytes)
                return steps[tokens].nbytes

            return search(peak, limit, times * case.start, **how), steps

    stock = {
        "activations kept": reach("stock", case.sizes()),
        "activations offloaded": reach("stock, offloaded", case.sizes(offload=True)),
    }
    best = max(stock, key=lambda name: stock[name][0].reach)
    baseline, baseline_steps = stock[best]
    ours, our_steps = reach("ours", case.sizes(schedules=SCHEDULES), times=8, beyond=None, close=1.05)
    without = {}
    for name in SCHEDULES if case.ablation else ():
        rest = tuple(schedule for schedule in SCHEDULES if schedule != name)
        found, _ = reach(f"ours without {name}", case.sizes(schedules=rest), times=2, beyond=None)
        without[name] = found.reach
    entry = {
        "case": case.name,
        "ranks": case.ranks,
        "budget_bytes": limit,
        "baseline_reach": baseline.reach,
        "our_reach": ours.reach,
        "reach": ours.reach / max(baseline.reach, 1),
        "baseline": best,
        "baseline_reaches": {name: found.reach for name, (found, _) in stock.items()},
        "without": without,
        "confirmed": _confirmed(baseline, baseline_steps, ours, our_steps),
        "steps": {
            "baseline": {str(tokens): nbytes for tokens, nbytes in sorted(baseline.peaks.items())},
            "ours": {str(tokens): nbytes for tokens, nbytes in sorted(ours.peaks.items())},
        },
        "gate": case.gate,
        "limits": dict(case.limits),
        "pairs": pairs,
    }
    if case.ablation:
        return entry | {"throughput_ratio": None, "loss_difference": None}
    return entry | _throughput(case, baseline.reach, pairs, threads, say)


def _confirmed(
    baseline: Found, baseline_steps: dict[int, Peak], ours: Found, our_steps: dict[int, Peak]
) -> dict[str, dict]:
    """The steps that were run at both reaches, and the one that stock did not keep the budget in."""
    chosen = {
        "baseline": (baseline_steps, baseline.reach),
        "baseline_beyond": (baseline_steps, baseline.beyond),
        "ours": (our_steps, ours.reach),
    }
    return {
        name: {
            "tokens": tokens,
            "peak_bytes": steps[tokens].nbytes,
            "at_peak": steps[tokens].components,
            "host_bytes": steps[tokens].host_bytes,
        }
        for name, (steps, tokens) in chosen.items()
        if tokens in steps
    }


def _throughput(
    case: EndToEndCase, tokens: int, pairs: int, threads: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """CPU seconds of all ranks, stock over ours, at `tokens`; and how far the losses of the same step are apart."""
    sides = {"stock": case.sizes(device=False), "ours": case.sizes(schedules=SCHEDULES, device=False)}
    times: list[dict[str, float]] = []
    with contextlib.ExitStack() as stack:
        calls = {
            name: stack.enter_context(processes(_OneSide(case.name, case.ranks, sizes), name, threads, _TIME_OUT))
            for name, sizes in sides.items()
        }
        say("the same step on both sides")
        losses = {name: [loss for _, loss in call(_timed, tokens)] for name, call in calls.items()}
        for pair in range(pairs):
            say(f"pair {pair + 1} of {pairs}")
            times.append({name: sum(seconds for seconds, _ in call(_timed, tokens)) for name, call in calls.items()})
    return {
        "throughput_ratio": statistics.median(pair["stock"] / pair["ours"] for pair in times),
        "baseline_cpu_seconds": statistics.median(pair["stock"] for pair in times),
        "cpu_seconds": statistics.median(pair["ours"] for pair in times),
        "loss_difference": max(
            abs(own - stock) / abs(stock) for own, stock in zip(losses["ours"], losses["stock"], strict=True)
        ),
    }


def _peak(side: Side, tokens: int) -> Peak:
    return side.peak(tokens)


def _timed(side: Side, tokens: int) -> tuple[float, float]:
    return side.timed(tokens)


# -- the table -------------------------------------------------------------------------------------------------------
def table(result: dict[str, Any]) -> Table:
    where = result["environment"]
    view = Table(
        title=f"{result['name']}: {where['cpu']}, {where['threads']} threads a rank, torch {where['torch']}",
        caption="Reach: tokens of a rank's sequence in the longest step that kept the budget; of stock, the better of"
        " activations kept and offloaded. Without: ours less one schedule."
        " Throughput: tokens per CPU second at stock's reach, ours over stock.",
        box=SIMPLE,
        show_lines=True,
    )
    view.add_column("case", min_width=24)
    for name in ("budget", "stock", "ours", "reach", "without", "throughput", "gate"):
        view.add_column(name, justify="right")
    for entry in result["cases"]:
        gate = "" if not entry["gate"] else "[red]missed[/]" if report.missed(entry) else "[green]met[/]"
        without = "\n".join(f"{name} {reach:,}" for name, reach in entry["without"].items())
        ratio = entry["throughput_ratio"]
        view.add_row(
            entry["case"],
            format_bytes(entry["budget_bytes"]),
            f"{entry['baseline_reach']:,}",
            f"{entry['our_reach']:,}",
            f"{entry['reach']:.1f}",
            without,
            "-" if ratio is None else f"{ratio:.2f}",
            gate,
        )
    return view
