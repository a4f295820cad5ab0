"""
Runs a case: each side in a fresh process of its own, step by step in turn.

The peaks of a side by the operating system mean something only in a process that has done nothing else, and its CPU
seconds only with an allocator that the other side has not warmed. So a side gets a process (or one for each of its
ranks), forked from this one, which has imported everything and computed nothing. The two then alternate, baseline,
ours, baseline, ours: what disturbs the machine for longer than a step disturbs both, and the median of the pairs'
ratios drops what does not.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks.case import SIDES, Case, Problem, Sizes, clear, step
from benchmarks.memory import Peaks, peaks
from benchmarks.processes import processes, rank

__all__ = ["cores", "measure"]

_WARM_UP_TOKENS = 64


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(
    case: Case, earlier: dict[str, dict], pairs: int, threads: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """
    A case's entry in the JSON.

    Arguments:
        case (`Case`): what to run.
        earlier (`dict[str, dict]`): the entries of the cases before it, by name.
        pairs (`int`): how many pairs of timed steps.
        threads (`int`): of torch, in each process.
        say (`Callable`): takes a line about what is going on.

    Raises:
        `RuntimeError`: a side failed, or its process died.
    """
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder)
        say("the step in float64")
        with processes(case, "reference", threads) as reference:
            reference(_save_reference, exact)
        with processes(case, "baseline", threads) as baseline, processes(case, "ours", threads) as ours:
            sides = dict(zip(SIDES, (baseline, ours), strict=True))
            found: dict[str, _Measured] = {}
            for name, side in sides.items():
                side(_warm_up, name, case.sizes)
                say(f"peaks and error, {name}")
                found[name] = _worst(side(_measure_once, name, exact))
            times = []
            for pair in range(pairs if case.timed else 0):
                say(f"pair {pair + 1} of {pairs}")
                times.append({name: _slowest(side(_time, name, case.steps)) for name, side in sides.items()})
    return _entry(case, found, times, earlier)


@dataclass(frozen=True)
class _Measured:
    peaks: Peaks
    error: float
    details: dict[str, Any]


def _worst(ranks: Sequence[_Measured]) -> _Measured:
    """The highest of each peak, and the largest error."""
    columns = zip(*(found.peaks for found in ranks), strict=True)
    highest = Peaks(*(None if None in column else max(column) for column in columns))
    return _Measured(highest, max(found.error for found in ranks), ranks[0].details)


def _slowest(ranks: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """CPU seconds of all ranks, and wall seconds of the slowest."""
    cpu, wall = zip(*ranks, strict=True)
    return sum(cpu), max(wall)


def _entry(case: Case, found: dict[str, _Measured], times: list[dict], earlier: dict[str, dict]) -> dict[str, Any]:
    stock, own = found["baseline"].peaks, found["ours"].peaks
    limits: dict[str, Any] = {}
    entry = {
        "case": case.name,
        "baseline_peak_bytes": stock.beyond,
        "peak_bytes": own.beyond,
        "peak_saved": 1 - own.beyond / max(stock.beyond, 1),
        "cpu_ratio": _median_ratio(times, 0),
        "wall_ratio": _median_ratio(times, 1),
        "error": found["ours"].error,
        "baseline_error": found["baseline"].error,
        "gate": case.gate,
        "limits": limits,
        "pairs": len(times),
        "baseline_beside_peak_bytes": stock.beside,
        "beside_peak_bytes": own.beside,
        "baseline_total_peak_bytes": stock.total,
        "total_peak_bytes": own.total,
        "baseline_system_peak_bytes": stock.by_system,
        "system_peak_bytes": own.by_system,
        "baseline_cpu_seconds": _median(times, "baseline", 0),
        "cpu_seconds": _median(times, "ours", 0),
        "baseline_wall_seconds": _median(times, "baseline", 1),
        "wall_seconds": _median(times, "ours", 1),
        **found["ours"].details,
    }
    limits.update((name, entry[limit] if isinstance(limit, str) else limit) for name, limit in case.limits.items())
    grows = case.grows_from
    if grows is not None:
        base = earlier[grows.case]["peak_bytes"]
        limits["peak_bytes"] = int(base * (1 + grows.slack)) + grows.bytes_per_unit * grows.units
        entry["growth"] = {**asdict(grows), "bytes_per_unit": (own.beyond - base) / grows.units}
    return entry


def _median_ratio(times: list[dict], which: int) -> float | None:
    return statistics.median(pair["ours"][which] / pair["baseline"][which] for pair in times) if times else None


def _median(times: list[dict], side: str, which: int) -> float | None:
    return statistics.median(pair[side][which] for pair in times) if times else None


# -- in the side's own process ----------------------------------------------------------------------------------------
def _save_reference(problem: Problem, folder: Path) -> None:
    torch.save(problem.reference(), folder / f"{rank()}.pt")


def _warm_up(problem: Problem, side: str, sizes: Sizes) -> None:
    """A few tokens through the same code: code pages, thread pools and libraries' buffers are no step's own memory."""
    small = replace(sizes, tokens=min(sizes.tokens, _WARM_UP_TOKENS)).build()
    peaks(lambda: step(small, side), [*small.given, small.upstream], small.leaves())


def _measure_once(problem: Problem, side: str, exact: Path) -> _Measured:
    leaves = problem.leaves()
    found, output = peaks(lambda: step(problem, side), [*problem.given, problem.upstream], leaves)
    results = [output.detach(), *(leaf.grad for leaf in leaves)]
    wanted = torch.load(exact / f"{rank()}.pt", mmap=True)
    error = max(_relative(result, want) for result, want in zip(results, wanted, strict=True))
    clear(problem)
    return _Measured(found, error, problem.details() if side == "ours" else {})


def _relative(result: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference, relative to the tensor's largest value."""
    return float((result.double() - exact).abs().max() / exact.abs().max())


def _time(problem: Problem, side: str, steps: int) -> tuple[float, float]:
    """CPU seconds of all threads, and wall seconds, of one step."""
    if distributed.is_initialized():
        distributed.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        output = step(problem, side)
        del output
        clear(problem)
    return (time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps
