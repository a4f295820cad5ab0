"""examples/plan_then_train.py: what was predicted is what the run takes; and a budget that nothing can keep."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(python):
    return lambda *arguments: python(ROOT / "examples" / "plan_then_train.py", *arguments, timeout=250)


@pytest.mark.slow
def test_the_run_takes_what_was_predicted(start, tmp_path):
    done = start("--output_dir", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "What dies first is vocab" in done.stdout
    assert "Every component is within 10% of its prediction." in done.stdout
    table = done.stdout[done.stdout.index("Predicted, and measured") :]
    found = dict(re.findall(r"^\| (\w+) .*\| +([\d.]+)% \|$", table, re.MULTILINE))
    assert {"dispatch", "vocab", "layer", "optimizer", "total"} <= set(found)
    assert max(map(float, found.values())) < 3.0
    total = json.loads((tmp_path / "peaks.json").read_text())["reports"]["this run"]["total"]
    assert total < 48 * 2**20  # what it was given


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_cannot_fit_is_refused_before_there_is_a_model(start, tmp_path):
    done = start("--output_dir", tmp_path, "--device_memory", "6MiB")
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert re.search(r"does not fit.*: \w+ \(.*\) by .*; fits with --device-memory [\d.]+MiB\.$", done.stderr.strip())
