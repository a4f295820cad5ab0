"""`python -m benchmarks boundaries`; nothing here depends on how fast anything is."""

import json

import jsonschema

from benchmarks import report
from benchmarks.boundaries import cases


def test_quick_run(python, tmp_path):
    file = tmp_path / "out.json"
    done = python("-m", "benchmarks", "boundaries", "--quick", "--threads", 1, "--json", file, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    jsonschema.validate(result, report.SCHEMA)
    entries = {case["case"]: case for case in result["cases"]}
    assert len(entries) == len(cases(quick=True)) == 5
    for case in entries.values():
        assert not case["gate"] and not report.missed(case)
        assert case["error"] == case["baseline_error"] and case["host_ratio"] == 1
        assert case["baseline_peak_bytes"] > 40 * case["boundary_bytes"]  # without offload all boundaries are there
        assert case["sent_down_bytes"] == case["offloaded"] * case["boundary_bytes"]
    deeper = next(case for case in entries.values() if "growth" in case)
    assert deeper["offloaded"] == 79 and deeper["growth"]["bytes_per_unit"] < deeper["boundary_bytes"] / 100


def test_the_gates_are_those_promised():
    known = cases(quick=False)
    assert len({case.name for case in known}) == len(known)
    for case in known:
        assert case.gate and case.limits["beside_peak_bytes"] == "bound_bytes"
        assert case.limits["error"] == "baseline_error" and case.limits["host_ratio"] == 1.02
    (deeper,) = (case for case in known if case.grows_from)
    assert deeper.grows_from.slack == 0.02 and known[0].limits["peak_saved"] == 0.9
    assert deeper.grows_from.bytes_per_unit * 100 < deeper.sizes.boundary
