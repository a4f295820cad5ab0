"""`python -m benchmarks gpu`, on the CPU; nothing here depends on how fast anything is."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch

from benchmarks import gpu, gpu_measure, report
from benchmarks.__main__ import main
from benchmarks.case import Case
from benchmarks.gpu_blocks import DeviceExpertsSizes, DeviceHeadSizes
from benchmarks.gpu_boundaries import LayersSizes
from benchmarks.gpu_measure import DeviceProblem, measure
from benchmarks.gpu_optimizer import StreamSizes

ROOT = Path(__file__).parents[2]
GiB = 2**30
ALLOCATED = ("allocated_bytes.all.current", "allocated_bytes.all.peak")


@pytest.fixture
def no_accelerator(monkeypatch):
    for module in (gpu, gpu_measure):
        monkeypatch.setattr(module, "run_device", lambda: torch.device("cpu"))


@pytest.mark.skipif(gpu.run_device().type != "cpu", reason="what is asserted is of the CPU")
def test_quick_run_on_the_cpu(python, tmp_path):
    file = tmp_path / "out.json"
    done = python("-m", "benchmarks", "gpu", "--quick", "--threads", 1, "--json", file, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    jsonschema.validate(result, report.SCHEMA)
    assert result["name"] == "gpu" and result["environment"]["device"] == "cpu"
    entries = {kind: [e for e in result["cases"] if e["case"].startswith(kind)] for kind in ("d", "v", "b", "o")}
    assert [len(found) for found in entries.values()] == [
        2,
        4 if hasattr(torch.nn, "LinearCrossEntropyOptions") else 2,
        2,
        4,
    ]
    for entry in result["cases"]:
        assert not entry["gate"] and not entry["limits"] and entry["device"] == "cpu"
        assert entry["cpu_ratio"] is None and entry["wall_ratio"] > 0 and entry["pairs"] == 3
    for entry in (*entries["d"], *entries["v"]):
        bound = 2e-2 if "bfloat16" in entry["case"] else 1e-5
        assert 0 < entry["error"] < bound and 0 < entry["baseline_error"] < bound
        assert 0 < entry["peak_bytes"] < entry["rise_bytes"]
    for entry in entries["b"]:
        assert entry["error"] == entry["differing_elements"] == entry["baseline_differing_elements"] == 0
        assert entry["baseline_boundaries_peak_bytes"] == 6 * entry["boundary_bytes"]
        assert entry["boundaries_peak_bytes"] <= entry["boundaries_bound_bytes"] == 3 * entry["boundary_bytes"]
        assert entry["offloaded"] == 5 and entry["host_ratio"] == 1
        assert entry["sent_down_bytes"] == entry["sent_up_bytes"] == 5 * entry["boundary_bytes"]
    for number, entry in enumerate(entries["o"]):
        assert entry["differing_elements"] == 0 and entry["steps"] == 5 and entry["error"] < 1e-6
        assert 0 < entry["requested_bytes"] <= entry["staging_bound_bytes"]
        assert sum(entry["stage_elements"].values()) == 12 * 2**13
        assert entry["best_wall_ratio"] == min(other["wall_ratio"] for other in entries["o"][: number + 1])


def test_without_an_accelerator_it_says_so_at_once(no_accelerator, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "cases", lambda quick: pytest.fail("cases were made"))
    assert main(["gpu"]) == 2
    told = capsys.readouterr()
    assert "needs an accelerator" in told.err and told.err.count("\n") == 1 and not told.out


def test_the_limits_are_those_promised(no_accelerator, monkeypatch):
    monkeypatch.setattr(gpu, "host_memory_available", lambda: 256 * GiB)
    known = gpu.cases(quick=False)
    assert len({case.name for case in known}) == len(known) and not any("shrunk" in case.name for case in known)
    for case in known:
        assert case.gate == isinstance(case.sizes, (LayersSizes, StreamSizes))
    against = {case.sizes.offload: case for case in known if isinstance(case.sizes, LayersSizes)}
    assert against[False].limits["wall_ratio"] == 1.01 and against[True].limits["wall_ratio"] == 1.0
    for case in against.values():
        assert case.sizes.layers >= 16 and case.limits["boundaries_peak_bytes"] == "boundaries_bound_bytes"
        assert case.limits["differing_elements"] == "baseline_differing_elements"
    ways = {case.sizes.update_on: case.limits for case in known if isinstance(case.sizes, StreamSizes)}
    assert list(ways) == ["accelerator", "cpu", "both", "auto"]  # the last looks back at the others
    assert ways["auto"]["best_wall_ratio"] == 1 / 2.05 and ways["cpu"]["differing_elements"] == 0
    assert all(limits["requested_bytes"] == "staging_bound_bytes" for limits in ways.values())


@pytest.mark.parametrize("memory", [150, 80, 40, 24, 12])
def test_sizes_shrink_to_the_memory(no_accelerator, monkeypatch, memory):
    monkeypatch.setattr(gpu, "host_memory_available", lambda: 256 * GiB)
    for case in gpu.cases(quick=False):
        fitting = gpu.fit(case.sizes, 0.85 * memory * GiB, 128 * GiB)
        assert fitting is not None and fitting.needs()[0] <= 0.85 * memory * GiB
        assert (fitting == case.sizes) or memory < 80  # what is asked for fits 80 GB
    assert gpu.fit(case.sizes, GiB, 128 * GiB) is None


def test_a_small_host_shrinks_the_optimizer_and_the_name_says_so(no_accelerator, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "host_memory_available", lambda: 16 * GiB)
    streams = [case for case in gpu.cases(quick=False) if isinstance(case.sizes, StreamSizes)]
    assert len(streams) == 4
    for case in streams:
        assert case.name.endswith(", shrunk to fit") and str(case.sizes.tokens) in case.name
    monkeypatch.setattr(gpu, "host_memory_available", lambda: GiB)
    assert not any(isinstance(case.sizes, StreamSizes) for case in gpu.cases(quick=False))
    assert capsys.readouterr().err.count("left out") >= 4


@dataclass(frozen=True)
class Doubling:
    """`2 x`; ours is wrong in one element, and the baseline, where it does not repeat, in another."""

    tokens: int = 8
    wrong: bool = False
    unsteady: bool = False
    too_large: int | None = None
    bitwise: bool = True

    def label(self):
        return f"doubling: {self.tokens}"

    def needs(self):
        return self.tokens, 0

    def smaller(self):
        return replace(self, tokens=self.tokens // 2) if self.tokens > 1 else None

    def build(self):
        if self.too_large is not None and self.tokens >= self.too_large:
            raise torch.OutOfMemoryError("too large")
        x = torch.arange(1.0, self.tokens + 1).requires_grad_()

        def ours():
            return 2 * x + (torch.nn.functional.one_hot(torch.tensor(2), self.tokens) if self.wrong else 0)

        def reference():
            y = 2 * x.detach()
            y[0] += self.unsteady
            return [y, torch.full_like(y, 2)]

        return DeviceProblem(
            [x],
            torch.ones(self.tokens),
            lambda: 2 * x,
            ours,
            reference,
            compared=lambda side, output: [output, x.grad],
            bitwise=self.bitwise,
        )


def run(sizes, **case):
    return measure(Case(name=sizes.label(), sizes=sizes, **case), {}, 3, torch.get_num_threads(), lambda what: None)


def test_a_wrong_result_is_seen(no_accelerator):
    exact = run(Doubling(), limits={"differing_elements": "baseline_differing_elements"})
    assert exact["error"] == exact["baseline_error"] == exact["differing_elements"] == 0 and not report.missed(exact)
    wrong = run(Doubling(wrong=True), limits={"differing_elements": "baseline_differing_elements"})
    assert wrong["error"] == 1 / 16 and wrong["differing_elements"] == 1 and len(report.missed(wrong)) == 1
    assert run(Doubling(wrong=True, bitwise=False))["error"] == 1 / 16
    unsteady = run(Doubling(unsteady=True))
    assert unsteady["baseline_differing_elements"] == 1 and unsteady["differing_elements"] == 0
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_does_not_fit_after_all_is_run_smaller(no_accelerator):
    assert run(Doubling(too_large=4))["case"] == "doubling: 2, shrunk to fit"
    with pytest.raises(torch.OutOfMemoryError):
        run(Doubling(too_large=1))


class Memory:
    """An allocator's counters: 10,000 bytes are there, and 16,000 at most."""

    def __init__(self, device):
        pass

    def reset_peak(self):
        pass

    def read(self):
        return 10_000, 16_000


def test_peaks_by_the_allocator(monkeypatch):
    monkeypatch.setattr(gpu_measure, "AcceleratorMemory", Memory)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    stats = {"requested_bytes.all.current": 9_000, "requested_bytes.all.peak": 14_000}
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: {**stats, **dict.fromkeys(ALLOCATED, 1)})
    problem = Doubling(tokens=100).build()  # the output and the gradient: 400 bytes, 512 of the allocator's
    found, output = gpu_measure._peaks(problem, "ours", SimpleNamespace(type="cuda"))
    assert found == (6_000 - 2 * 512, 6_000, 5_000) and output.shape == (100,)
    stats.clear()  # an allocator that does not count what was asked for
    assert gpu_measure._requested(SimpleNamespace(type="cuda"), "peak") == 1


@pytest.mark.parametrize(
    "sizes",
    [
        DeviceExpertsSizes(model="qwen3_moe", tokens=600, hidden=32, width=16, experts=16, top_k=4, budget="256KiB"),
        DeviceHeadSizes(tokens=600, hidden=32, vocab=9000, budget="1MiB"),
    ],
    ids=["experts", "head"],
)
def test_references_of_a_part(no_accelerator, sizes):
    """Of more tokens and rows than are compared: the parts are those of the whole step."""
    entry = run(sizes)
    assert "first 256 tokens" in entry["error_relative_to"]
    assert 0 < entry["error"] < (1e-5 if isinstance(sizes, DeviceHeadSizes) else 2e-2)
