"""`python -m benchmarks` at sizes that only show that it runs; nothing here depends on how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch

from benchmarks import memory, report
from benchmarks.__main__ import main

ROOT = Path(__file__).parents[2]
MiB = 2**20


# Of dispatch only the longest case, which brings along the one that its limit comes from.
@pytest.mark.parametrize("arguments", [["vocab"], ["dispatch", "--only", "T 1024"]], ids=["vocab", "dispatch"])
def test_quick_run_writes_the_projects_json(python, arguments, tmp_path):
    def run(*arguments):
        return python("-m", "benchmarks", *arguments, timeout=240)

    done = run(*arguments, "--quick", "--threads", 1, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(result, report.SCHEMA)
    assert result["name"] == arguments[0] and result["environment"]["threads"] == 1
    assert (
        len({case["case"] for case in result["cases"]}) == len(result["cases"]) == (2 if "--only" in arguments else 6)
    )
    for case in result["cases"]:
        assert not case["gate"] and case["pairs"] in (0, 3)
        assert (case["cpu_ratio"] is None) == (case["wall_ratio"] is None) == (case["pairs"] == 0)
        assert case["peak_saved"] == pytest.approx(1 - case["peak_bytes"] / case["baseline_peak_bytes"])
        assert 0 < case["peak_bytes"] <= case["beside_peak_bytes"] < case["total_peak_bytes"]
        bound = 2e-2 if "bfloat16" in case["case"] else 1e-5
        assert 0 < case["error"] < bound and 0 < case["baseline_error"] < bound
    longer = next(case for case in result["cases"] if "growth" in case)
    shorter = next(case for case in result["cases"] if case["case"] == longer["growth"]["case"])
    assert not report.missed(longer) and longer["limits"]["peak_bytes"] < 2 * shorter["peak_bytes"]
    growth = (longer["peak_bytes"] - shorter["peak_bytes"]) / longer["growth"]["units"]
    assert longer["growth"]["bytes_per_unit"] == pytest.approx(growth)
    assert "saved" in done.stdout
    if "--only" in arguments:
        only = ["--only", shorter["case"], "--json", tmp_path / "out.json"]
        assert run(arguments[0], *only, "--quick", "--threads", 1).returncode == 0
        again = json.loads((tmp_path / "out.json").read_text())["cases"]
        assert longer in again and shorter not in again


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vocab", "--only", "T 7", "--quick"], "the cases are"),
        (["vocab", "--json", "no/such/folder/x.json"], "there is no folder"),
        (["vocab", "--threads", "0"], "at least 1"),
        (["vocabulary"], "invalid choice"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_peaks_beyond_what_is_excluded():
    leaf = torch.ones(MiB, requires_grad=True)  # 4 MiB, as are the output, the scratch and the gradients

    def step():
        scratch = torch.ones(3 * MiB)
        output = leaf * 2
        scratch[:1].add_(output.detach()[:1])
        del scratch
        output.backward(upstream)
        return output

    upstream = torch.ones(MiB)
    memory.peaks(step, [leaf, upstream], [leaf])
    leaf.grad = None
    found, output = memory.peaks(step, [leaf, upstream], [leaf])
    assert found.beside == 12 * MiB
    assert found.total == 24 * MiB  # the gradient comes after the scratch is gone
    assert found.beyond == 8 * MiB
    assert output.shape == (MiB,)


BY_SYSTEM = """
import torch
from benchmarks import memory

MiB = 2**20
leaf, upstream = torch.ones(8 * MiB, requires_grad=True), torch.ones(8 * MiB)

def step():
    scratch = torch.ones(24 * MiB)
    output = leaf * 2
    scratch[:1].add_(output.detach()[:1])
    del scratch
    output.backward(upstream)
    return output

memory.peaks(step, [leaf, upstream], [leaf])
leaf.grad = None
found, _ = memory.peaks(step, [leaf, upstream], [leaf])
print(found.beyond, found.by_system)
"""


def test_peaks_by_the_system():
    """In a process of its own: what others have left on the heap is neither new nor gone there."""
    run = [sys.executable, "-c", BY_SYSTEM]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    beyond, by_system = done.stdout.split()
    assert int(beyond) == 64 * MiB
    if by_system != "None":
        assert int(by_system) == pytest.approx(int(beyond), abs=8 * MiB)


def entry(**values):
    return {"case": "c", "peak_saved": 0.95, "cpu_ratio": 1.0, "peak_bytes": 100, "limits": {}, **values}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"limits": {"peak_saved": 0.95, "cpu_ratio": 1.0, "peak_bytes": 100}}, []),
        ({"limits": {"peak_saved": 0.96}}, ["peak_saved is 0.95, wanted at least 0.96"]),
        ({"limits": {"cpu_ratio": 0.99}}, ["cpu_ratio is 1, wanted at most 0.99"]),
        ({"limits": {"peak_bytes": 99}, "cpu_ratio": None}, ["peak_bytes is 100, wanted at most 99"]),
        ({"limits": {"cpu_ratio": 1.0}, "cpu_ratio": None}, ["cpu_ratio was not measured"]),
    ],
)
def test_missed_limits(values, words):
    assert [line.removeprefix("c: ") for line in report.missed(entry(**values))] == words
