"""`python -m benchmarks planner`: its small configs, its cases, and what it writes."""

import json

import jsonschema
import pytest

from benchmarks import report
from benchmarks.families import FAMILIES, small_config
from benchmarks.planner import FAKE, REAL, SCHEMA, STAND_IN, cases, measure, table
from hf_longmoe.integrations.transformers.planning_shape import depths_of, shape_of

# Families whose shape the planner cannot read yet, or that have none, and how it says so.
UNPLANNED = {
    "openai_privacy_filter": "there is no causal LM for it",  # it classifies tokens
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_small_config_of_a_family(family):
    config = small_config(family)
    if family in UNPLANNED:
        with pytest.raises((ValueError, RuntimeError), match=UNPLANNED[family]):
            shape_of(config)
        return
    shape = shape_of(config)
    assert (shape.hidden, shape.experts) == (256, 8) and 1900 < shape.vocab < 2200
    assert shape.top_k == (1 if family == "zaya" else 2) and shape.expert_width >= 128
    assert any(shape.sparse) and shape.parameters < 200e6
    ran = depths_of(config)
    # What is counted is less than what is predicted, but where bytes are not affine in the layers.
    assert ran[-1] < shape.depth or family in ("mistral_large4", "inkling2", "inkling2_loop"), ran


def test_families_by_name():
    assert len(FAMILIES) == 67
    assert set(STAND_IN) | set(FAKE) | set(UNPLANNED) <= set(FAMILIES)


def test_the_cases():
    known = [case.name for case in cases(quick=False)]
    small = [f"{f}, {c}, {w}" for f in FAMILIES for c in ("non-reentrant", "off") for w in ("unbounded", "scheduled")]
    assert known[: len(small)] == small and len(set(known)) == len(known)
    assert all(case.gate for case in cases(quick=False) + cases(quick=True))
    assert [name for name in known if "DeepSeek-V3" in name][-1] == (
        "larger, fake step: DeepSeek-V3, ep 64 of 64 ranks, T 1M, scheduled"
    )
    assert sum(any(model in name for model in REAL) for name in known) == 6 * len(REAL)


@pytest.mark.exhaustive
def test_quick_run_writes_the_schema(python, tmp_path):
    file = tmp_path / "out.json"
    command = ["-m", "benchmarks", "planner", "--quick", "--only", "mixtral, non-reentrant, unb"]
    done = python(*command, "--json", file, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    jsonschema.validate(result, SCHEMA)
    (case,) = result["cases"]
    assert case["case"] == "mixtral, non-reentrant, unbounded" and "sdpa" == case["attention"]
    rows = {row["component"]: row for row in case["rows"]}
    assert {"parameters", "gradients", "optimizer", "boundaries", "dispatch", "vocab", "total"} <= set(rows)
    worst = max((row for name, row in rows.items() if name != "total"), key=lambda row: row["difference"])
    assert {name: case[name] for name in worst} == worst
    assert case["total_difference"] == rows["total"]["difference"] <= 0.03
    boundaries = rows["boundaries"]["measured_bytes"]
    assert boundaries == small_config("mixtral").num_hidden_layers * 2048 * 256 * 2
    assert "worst component" in done.stdout and "met" in done.stdout


def test_a_case_that_cannot_be_planned_is_missed_with_its_reason():
    (case,) = [case for case in cases(quick=False) if case.name == "openai_privacy_filter, off, unbounded"]
    entry = measure(case, {}, pairs=0, threads=1, say=print)
    assert "no causal LM" in entry["problem"] and entry["rows"] == []
    assert report.missed(entry) == [
        f"{case.name}: {name} was not measured" for name in ("difference", "total_difference")
    ]
    result = {"name": "planner", "environment": report.environment(1), "cases": [entry]}
    jsonschema.validate(result, SCHEMA)
    assert table(result).row_count == 1
