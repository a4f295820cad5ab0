"""`python -m benchmarks expert_parallel` and what it is made of; nothing here depends on how fast anything is."""

import json
import sys
import time
from dataclasses import dataclass

import jsonschema
import pytest
import torch
from torch import distributed

from benchmarks import report
from benchmarks.case import Case, Problem
from benchmarks.expert_parallel import cases, smallest_budget
from benchmarks.processes import processes, rank
from benchmarks.routing import choose


def test_quick_run_on_two_and_four_ranks(python, tmp_path):
    file = tmp_path / "out.json"
    done = python("-m", "benchmarks", "expert_parallel", "--quick", "--only", "95%", "--json", file, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    jsonschema.validate(result, report.SCHEMA)
    assert result["environment"]["threads"] == 1
    entries = {case["case"]: case for case in result["cases"]}
    assert len(entries) == 5
    for name, case in entries.items():
        assert not case["gate"] and not report.missed(case)
        assert 0 < case["error"] < 1e-5 and 0 < case["baseline_error"] < 1e-5
        assert (case["wall_ratio"] is None) == ("profile" in name)
        if "strided chunks" in name:
            assert case["chunks"] == 4 and case["limits"] == {}
            continue
        assert 0 < case["beside_peak_bytes"] <= case["bound_bytes"] == case["limits"]["beside_peak_bytes"]
        assert case["largest_receive"] <= 1 and case["largest_send"] <= 1 and case["send_ratio"] >= 1
        assert case["waves"] >= case["waves_lower_bound"] > 0
        assert case["moves"] > 0 and max(case["load"]) < max(case["native_load"])
        for waves in (1, 4):
            assert f", {waves} wave" not in name or case["waves"] == waves
    assert "4 ranks" in list(entries)[-1] and "saved" in done.stdout


def test_the_gates_are_those_promised():
    known = cases(quick=False)
    assert len({case.name for case in known}) == len(known)
    gates = [case for case in known if case.gate]
    times = [case.limits["wall_ratio"] for case in gates if "wall_ratio" in case.limits]
    assert sorted(times) == [0.65] * 9 + [0.95] * 9  # three shapes, at one, four and ten waves
    saved = {case.sizes.routing: case.limits["peak_saved"] for case in gates if "peak_saved" in case.limits}
    assert saved == {"profile balanced": 0.85, "profile 80%/16": 0.95, "profile 95%/1": 0.95}
    assert all(case.limits["beside_peak_bytes"] == "bound_bytes" for case in gates)


def test_routing_at_random_and_to_one_rank():
    torch.manual_seed(0)
    for routing, share in (("balanced", 0.25), ("95% to rank 0", 0.9625)):
        index, weights = choose(routing, 2000, 16, 3, local=4)
        assert index.shape == weights.shape == (2000, 3)
        assert weights.sum(1).allclose(torch.ones(2000))
        assert (index < 4).float().mean().item() == pytest.approx(share, abs=0.03)
        assert all(len(set(row)) == 3 for row in index.tolist())


def test_routing_profiles():
    index, _ = choose("profile balanced", 3, 4, 2, local=2)
    assert index.tolist() == [[0, 1], [1, 2], [2, 3]]
    index, weights = choose("profile 50%/3", 4, 5, 4, local=5)
    assert index.tolist() == [[0, 1, 2, 0], [0, 1, 2, 0], [3, 4, 3, 4], [4, 3, 4, 3]]
    assert weights.sum(1).allclose(torch.ones(4))


@pytest.mark.parametrize("routing", ["even", "profile 30%", "profile 30%/8"])
def test_unknown_routing_is_refused(routing):
    with pytest.raises(ValueError, match="unknown; give|needs more than 8 experts, got 8"):
        choose(routing, 4, 8, 2, local=4)


@pytest.mark.parametrize(("wanted", "budget"), [(1, 100_000), (4, 25_000), (10, 20_000), (1000, 20_000)])
def test_smallest_budget(wanted, budget):
    def waves(given):
        if given < 20_000:
            raise ValueError("below one wave")
        return -(-100_000 // given)

    found = smallest_budget(waves, wanted, resolution=16)
    assert budget <= found <= budget + 16 and waves(found) <= wanted


@dataclass(frozen=True)
class Ranks:
    tokens: int = 1

    def build(self):
        x = torch.full((1,), float(rank()), requires_grad=True)
        return Problem([x], torch.ones(1), lambda: x * 1, lambda: x * 2, lambda: [])


def group(seconds, ranks=3):
    return processes(Case(name="case", sizes=Ranks(), ranks=ranks), "ours", threads=1, seconds=seconds)


def _sum(problem, factor):
    total = problem.given[0].detach() * factor
    distributed.all_reduce(total)
    return rank(), total.item()


def _fail_on_rank_1(problem):
    if rank() == 1:
        raise ValueError("no such luck")
    distributed.barrier()


def _die_on_rank_1(problem):
    if rank() == 1:
        sys.exit(3)
    distributed.barrier()


def _hang_on_rank_1(problem):
    if rank() == 1:
        time.sleep(60)
    return rank()


def test_every_rank_answers():
    with group(seconds=60) as call:
        assert call(_sum, 10.0) == [(0, 30.0), (1, 30.0), (2, 30.0)]
        assert call(_sum, 1.0) == [(0, 3.0), (1, 3.0), (2, 3.0)]
    with group(seconds=60, ranks=1) as call:
        assert call(_alone) == [(0, False)]


def _alone(problem):
    return rank(), distributed.is_initialized()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_fail_on_rank_1, r"case: ours: rank 1 failed.\n(.|\n)*ValueError: no such luck"),
        (_die_on_rank_1, "rank 1 died with exit code 3"),
        (_hang_on_rank_1, r"no answer from rank \[1\] within 8 seconds"),
    ],
)
def test_a_rank_that_fails_dies_or_hangs_ends_in_an_error(function, words):
    with group(seconds=8) as call, pytest.raises(RuntimeError, match=words):
        call(function)
