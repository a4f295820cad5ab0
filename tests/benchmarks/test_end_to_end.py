"""`python -m benchmarks end_to_end`; nothing here depends on how fast anything is."""

import json

import jsonschema
import pytest

from benchmarks import report
from benchmarks.end_to_end import SCHEMA, cases
from benchmarks.end_to_end_search import search
from benchmarks.end_to_end_side import SCHEDULES, EndToEndModel, SideSizes

TINY = EndToEndModel(hidden=32, width=32, layers=6, experts=4, top_k=2, vocab=512)


def bent(tokens):
    """Flat, then steep, as where another component becomes the largest."""
    return max(1000 + tokens, 10 * tokens - 5000)


@pytest.mark.parametrize("peak", [lambda tokens: 500 + 3 * tokens, bent, lambda tokens: tokens**2 // 100])
@pytest.mark.parametrize("start", [64, 1024, 2**20])
def test_search_ends_within_the_promised_distance(peak, start):
    limit, ran = 20_000, []

    def run(tokens):
        ran.append(tokens)
        return peak(tokens)

    found = search(run, limit, start, steps=40)
    assert sorted(found.peaks) == sorted(ran) and len(set(ran)) == len(ran), "a step was run twice"
    assert peak(found.reach) <= limit < peak(found.beyond)
    assert found.beyond <= max(1.1 * found.reach, found.reach + 64)
    assert not any(found.reach < tokens < found.beyond for tokens in ran)


def test_search_runs_nothing_that_is_too_long_where_it_need_not():
    found = search(lambda tokens: 500 + 3 * tokens, 20_000, 64, beyond=None)
    assert found.beyond is None and found.reach * 1.03 >= 6500 - 64 and len(found.peaks) == 3


def test_search_where_nothing_fits():
    found = search(lambda tokens: 10**6, 1000, 256)
    assert found.reach == 0 and found.beyond == 64


def test_what_is_offloaded_is_not_counted_and_the_losses_stay():
    tokens, layers = 256, TINY.layers
    boundary = tokens * TINY.hidden * 4
    caps = {"dispatch": "256KiB", "vocab": "256KiB", "bucket": "64KiB"}
    sides = {
        "stock": SideSizes(model=TINY, ranks=1),
        "stock, offloaded": SideSizes(model=TINY, ranks=1, offload=True),
        "ours": SideSizes(model=TINY, ranks=1, schedules=SCHEDULES, **caps),
        "ours, no device": SideSizes(model=TINY, ranks=1, schedules=SCHEDULES, **caps, device=False),
    }
    found = {name: sizes.build().peak(tokens) for name, sizes in sides.items()}
    stock, offloaded, ours, plain = found.values()
    assert offloaded.loss == stock.loss  # bit for bit: only copies differ
    assert abs(ours.loss - stock.loss) < 1e-5 and abs(plain.loss - stock.loss) < 1e-5
    assert stock.components["boundaries"] == layers * boundary
    assert stock.host_bytes == plain.host_bytes == 0
    assert offloaded.host_bytes == layers * boundary
    assert offloaded.components.get("boundaries", 0) <= 2 * boundary
    state = 8 * sum(p.numel() for p in sides["stock"].build().model.parameters())
    assert ours.host_bytes >= state + (layers - 1) * boundary
    assert ours.components.get("optimizer", 0) <= 2 * 2**16 + 1024 < state < plain.components["optimizer"] * 1.01
    assert ours.nbytes < offloaded.nbytes


def test_the_gates_are_those_promised():
    known = cases(quick=False)
    assert len({case.name for case in known}) == len(known)
    gates = [case for case in known if case.gate]
    assert {(case.ranks, case.limits["reach"]) for case in gates} == {(n, r) for n in (1, 2, 4) for r in (8.0, 32.0)}
    assert all(case.limits["throughput_ratio"] == 0.95 and case.limits["loss_difference"] == 1e-5 for case in gates)
    assert sum(case.ablation for case in known) == 2 and not any(case.gate for case in known if case.ablation)


def test_reach_and_throughput_are_lower_limits():
    entry = {"case": "x", "reach": 7.0, "throughput_ratio": 0.9, "loss_difference": 1e-6}
    entry["limits"] = {"reach": 8.0, "throughput_ratio": 0.95, "loss_difference": 1e-5}
    assert [line.split(": ")[1].split(" is ")[0] for line in report.missed(entry)] == ["reach", "throughput_ratio"]
    assert report.missed({**entry, "reach": 8.5, "throughput_ratio": 1.2}) == []


@pytest.mark.slow
@pytest.mark.parametrize("only", [pytest.param("reach: tiny, 2 ranks", marks=pytest.mark.exhaustive), "shares: tiny"])
def test_quick_run(python, only, tmp_path):
    file = tmp_path / "out.json"
    done = python("-m", "benchmarks", "end_to_end", "--quick", "--only", only, "--json", file, timeout=290)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    jsonschema.validate(result, SCHEMA)
    (case,) = result["cases"]
    budget, steps = case["budget_bytes"], case["confirmed"]
    assert steps["baseline"]["tokens"] == case["baseline_reach"] == max(case["baseline_reaches"].values())
    assert steps["ours"]["tokens"] == case["our_reach"]
    assert max(steps["baseline"]["peak_bytes"], steps["ours"]["peak_bytes"]) <= budget
    assert steps["baseline_beyond"]["peak_bytes"] > budget
    assert case["reach"] == case["our_reach"] / case["baseline_reach"] > 8
    assert steps["ours"]["host_bytes"] > steps["baseline"]["host_bytes"]
    if "shares" in only:
        assert case["throughput_ratio"] is None
        assert set(case["without"]) == set(SCHEDULES)
        assert case["without"]["vocab"] < case["our_reach"] / 4
    else:
        assert case["ranks"] == 2 and case["throughput_ratio"] > 0 and case["without"] == {}
        assert case["loss_difference"] < 1e-5
