"""
Runs a case on one accelerator: both sides in this process, in turn. Without an accelerator, on the CPU: that it runs.

Peaks are the allocator's, times are wall clock from one standstill of the device to the next. A process that has used
CUDA cannot be forked, so that both sides share one, each warmed up at full size before anything is measured.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from benchmarks.case import SIDES, Case, Problem, clear, step
from benchmarks.memory import peaks
from hf_longmoe.peaks.allocator import AcceleratorMemory
from hf_longmoe.peaks.storage import rounded
from hf_longmoe.schedules.host import AcceleratorEngine, Engine, FakeEngine, has_own_memory

__all__ = ["DeviceProblem", "DeviceSizes", "engine_of", "measure", "run_device", "wait"]

_SECONDS, _LEAST_PAIRS = 20.0, 3  # pairs of a case end when it has run so long, but not before there are a few


@dataclass(frozen=True)
class DeviceProblem(Problem):
    """
    A problem that may be too large for a whole step in float64.

    Arguments:
        compared (`Callable`): `(side, output) -> tensors` after a step of that side: what is compared, in the order of
            `reference()`. They may be parts of larger ones.
        against (`str`): what `reference()` is, in words.
        bitwise (`bool`, defaults to `False`): also count the elements in which the sides differ, and those in which
            the baseline differs from the reference, with torch's deterministic algorithms.
        rivals (`bool`, defaults to `False`): the entry also has `best_wall_ratio`, the lowest of this and of the
            earlier ones whose names begin alike, up to the colon.
        close (`Callable`): gives back what garbage collection does not.
    """

    compared: Callable[[str, torch.Tensor], list[torch.Tensor]] = lambda side, output: [output]
    against: str = "float64"
    bitwise: bool = False
    rivals: bool = False
    close: Callable[[], None] = lambda: None


class DeviceSizes(Protocol):
    """`build()` makes the problem on torch's default device."""

    def label(self) -> str: ...

    def build(self) -> DeviceProblem: ...

    def needs(self) -> tuple[int, int]:
        """Bytes of the device and of the host that the larger side takes, roughly and not too few."""

    def smaller(self) -> DeviceSizes | None:
        """The next smaller sizes; None: smaller ones would show nothing."""


class _Peaks(NamedTuple):
    beyond: int  # given tensors, output and gradients
    rise: int  # beyond what was there before the step
    requested: int  # as `rise`, without what the allocator rounds up


def run_device() -> torch.device:
    """The accelerator, where there is one with memory of its own, else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None and has_own_memory(found):
        return torch.device(found.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def engine_of(device: torch.device) -> Engine:
    return FakeEngine() if device.type == "cpu" else AcceleratorEngine(device)


def wait(device: torch.device) -> None:
    """For everything that was launched."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure(
    case: Case, earlier: dict[str, dict], pairs: int, threads: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """
    A case's entry in the JSON; arguments as in `harness.measure`. Where memory does not suffice after all, the sizes
    are made smaller, and the entry says so.

    Raises:
        `torch.OutOfMemoryError`, `MemoryError`: sizes that cannot be made smaller do not fit either.
    """
    torch.set_num_threads(threads)
    device, sizes, name = run_device(), case.sizes, case.name
    while True:
        _collect(device)
        try:
            return _measure(replace(case, sizes=sizes, name=name), device, earlier, pairs, say)
        except (torch.OutOfMemoryError, MemoryError):
            sizes = sizes.smaller()
            if sizes is None:
                raise
            name = f"{sizes.label()}, shrunk to fit"


def _collect(device: torch.device) -> None:
    """What the case before has left behind in cycles."""
    if device.type != "cpu":
        gc.collect()
        torch.accelerator.empty_cache()


def _measure(
    case: Case, device: torch.device, earlier: dict[str, dict], pairs: int, say: Callable[[str], None]
) -> dict[str, Any]:
    say("building")
    with device:
        problem = case.sizes.build()
    try:
        return _sides(case, problem, device, earlier, pairs, say)
    finally:
        clear(problem)
        problem.close()


def _sides(
    case: Case,
    problem: DeviceProblem,
    device: torch.device,
    earlier: dict[str, dict],
    pairs: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    for side in SIDES:
        say(f"warm-up, {side}")
        _time(problem, side, device)
    found: dict[str, _Peaks] = {}
    results: dict[str, list[torch.Tensor]] = {}
    for side in SIDES:
        say(f"peaks and error, {side}")
        found[side], output = _peaks(problem, side, device)
        if not problem.bitwise:
            results[side] = _kept(problem, side, output)
        del output
        clear(problem)
    say(f"the reference: {problem.against}")
    with _deterministic(problem.bitwise):
        for side in SIDES if problem.bitwise else ():
            results[side] = _kept(problem, side, step(problem, side))
            clear(problem)
        exact = problem.reference()
        clear(problem)
    errors = {side: _error(results[side], exact) for side in SIDES}
    entry: dict[str, Any] = {}
    if problem.bitwise:
        entry["differing_elements"] = _differing(results["ours"], results["baseline"])
        entry["baseline_differing_elements"] = _differing(results["baseline"], exact)
    del results, exact
    times: list[dict[str, float]] = []
    begun = time.perf_counter()
    while len(times) < pairs and (len(times) < _LEAST_PAIRS or time.perf_counter() - begun < _SECONDS):
        say(f"pair {len(times) + 1} of {pairs}")
        times.append({side: _time(problem, side, device) for side in SIDES})
    entry = {**_entry(case, found, errors, times, device, problem.against), **entry, **problem.details()}
    if problem.rivals:
        kind = case.name.partition(":")[0]
        alike = [entry, *(other for name, other in earlier.items() if name.partition(":")[0] == kind)]
        entry["best_wall_ratio"] = min((one["wall_ratio"] for one in alike if one["wall_ratio"]), default=None)
    limits = {name: entry[limit] if isinstance(limit, str) else limit for name, limit in case.limits.items()}
    return {**entry, "limits": limits}


def _entry(
    case: Case,
    found: dict[str, _Peaks],
    errors: dict[str, float],
    times: list[dict[str, float]],
    device: torch.device,
    against: str,
) -> dict[str, Any]:
    stock, own = found["baseline"], found["ours"]
    return {
        "case": case.name,
        "baseline_peak_bytes": stock.beyond,
        "peak_bytes": own.beyond,
        "peak_saved": 1 - own.beyond / stock.beyond if stock.beyond else 0.0,
        "cpu_ratio": None,
        "wall_ratio": statistics.median(pair["ours"] / pair["baseline"] for pair in times) if times else None,
        "error": errors["ours"],
        "baseline_error": errors["baseline"],
        "gate": case.gate,
        "pairs": len(times),
        "device": device.type,
        "error_relative_to": against,
        "baseline_rise_bytes": stock.rise,
        "rise_bytes": own.rise,
        "baseline_requested_bytes": stock.requested,
        "requested_bytes": own.requested,
        "baseline_system_peak_bytes": None,
        "system_peak_bytes": None,
        "baseline_wall_seconds": statistics.median(pair["baseline"] for pair in times) if times else None,
        "wall_seconds": statistics.median(pair["ours"] for pair in times) if times else None,
    }


# -- one step ---------------------------------------------------------------------------------------------------------
def _time(problem: DeviceProblem, side: str, device: torch.device) -> float:
    """Wall seconds of a step."""
    wait(device)
    begun = time.perf_counter()
    output = step(problem, side)
    del output
    clear(problem)
    wait(device)
    return time.perf_counter() - begun


def _peaks(problem: DeviceProblem, side: str, device: torch.device) -> tuple[_Peaks, torch.Tensor]:
    given, leaves = [*problem.given, problem.upstream], problem.leaves()
    if device.type == "cpu":
        seen, output = peaks(lambda: step(problem, side), given, leaves)
        rise = seen.total - _bytes(given, device)
        return _Peaks(seen.beyond, rise, rise), output
    memory = AcceleratorMemory(device)
    wait(device)
    memory.reset_peak()
    before, asked = memory.read()[0], _requested(device, "current")
    output = step(problem, side)
    wait(device)
    rise = memory.read()[1] - before
    made = [output, *(leaf.grad for leaf in leaves)]
    beyond = rise - (_bytes([*given, *made], device) - _bytes(given, device))
    return _Peaks(max(beyond, 0), rise, _requested(device, "peak") - asked), output


def _requested(device: torch.device, when: str) -> int:
    stats = torch.accelerator.memory_stats(device)
    return stats.get(f"requested_bytes.all.{when}", stats[f"allocated_bytes.all.{when}"])


def _bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Of their storages, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(rounded(storage, device) for storage in storages.values())


# -- what came out ----------------------------------------------------------------------------------------------------
def _kept(problem: DeviceProblem, side: str, output: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in problem.compared(side, output)]


def _error(results: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest difference, relative to each tensor's largest value."""
    return max(_relative(result, want) for result, want in zip(results, exact, strict=True))


def _relative(result: torch.Tensor, want: torch.Tensor) -> float:
    largest = float(want.abs().max())
    difference = float((result.to(want.dtype) - want).abs().max())
    return difference / largest if largest else difference


def _differing(ones: list[torch.Tensor], others: list[torch.Tensor]) -> int:
    return sum(int((one != other).sum()) for one, other in zip(ones, others, strict=True))


@contextmanager
def _deterministic(on: bool) -> Iterator[None]:
    """Where kernels exist that give the same sums each time, they are taken."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    if on:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings():
            if on:
                warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill
