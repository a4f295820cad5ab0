"""Whatever ends a run, by its ranks or one of them: nothing saved is lost, all ranks end, and say why."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WHOLE = {"whole": {}}
JIT = {"options": {"enable_jit_checkpoint": True}, "resume": True}
CASES = {  # the first is what the others are held against: they have come further than it did before it stopped
    "term": {"kind": "term", "on": [1], **JIT},
    "copies": {"kind": "copies", "on": [1]},
    "writing": {"kind": "writing", "on": [1]},
    "backward": {"kind": "backward", "on": [1]},
    "disk": {"kind": "disk", "on": [1]},
}
MORE = {
    "step": {"kind": "step", "on": [1]},
    "step, all": {"kind": "step", "on": [0, 1]},
    "step, rank 0": {"kind": "step", "on": [0]},
    "copies, all": {"kind": "copies", "on": [0, 1]},
    "writing, all": {"kind": "writing", "on": [0, 1], "resume": True},
    "writing, rank 0": {"kind": "writing", "on": [0]},
    "renaming, rank 0": {"kind": "renaming", "on": [0], "over": "whole", "resume": True},
    "forward": {"kind": "forward", "on": [1]},
    "forward, and stays": {"kind": "forward", "on": [1], "stays": True},
    "forward, rank 0": {"kind": "forward", "on": [0]},
    "backward, rank 0": {"kind": "backward", "on": [0]},
    "backward, all": {"kind": "backward", "on": [0, 1]},
    "disk, rank 0": {"kind": "disk", "on": [0]},
    "term, all": {"kind": "term", "on": [0, 1], **JIT},
}
FIRST = ["checkpoint-2", "checkpoint-4"]
ALL = [*FIRST, "checkpoint-6", "checkpoint-7"]
DIED = "another rank failed. rank {}: the connection to another rank broke, which ended without a word"


def runs(folder, cases):
    (folder / "cases.json").write_text(json.dumps(cases))
    run = subprocess.run(
        [sys.executable, str(HERE / "faults_worker.py"), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    found = runs(tmp_path_factory.mktemp("few"), CASES)
    return found | {"whole": {"losses": found["term"]["losses"] | found["term"]["after"]}}


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    found = runs(tmp_path_factory.mktemp("more"), WHOLE | MORE)
    assert [rank["code"] for rank in found["whole"]["ended"]] == [0, 0]
    return found


def check(results, name, case):
    found, whole = results[name], results["whole"]
    kind, on = case["kind"], case["on"]
    others = [rank for rank in (0, 1) if rank not in on]
    said = [rank["said"].strip().splitlines() for rank in found["ended"]]
    codes = [rank["code"] for rank in found["ended"]]
    assert found["same"], "the checkpoint of the step before is another than that of a run that was not ended"
    assert all(whole["losses"][step] == loss for step, loss in found["losses"].items())
    if kind in ("step", "copies", "writing", "renaming"):
        assert codes == [-9 if rank in on else 1 for rank in (0, 1)]
        assert all(DIED.format(rank) in said[rank][-1] for rank in others)
        aside = {"writing": [".saving-checkpoint-6"], "renaming": [".replaced-checkpoint-6", ".saving-checkpoint-6"]}
        assert found["left"] == [*aside.get(kind, []), *FIRST]
    elif kind in ("forward", "backward"):
        assert codes == [1, 1] and found["left"] == FIRST
        own = f"OutOfMemoryError: out of memory, in {kind}"
        assert all(said[rank][-1].endswith(f"torch.{own}") for rank in on)
        assert all(said[rank][-1].endswith(f"another rank failed. rank {on[0]}: {own}") for rank in others)
        if case.get("stays"):
            assert said[0][-1].startswith("hf_longmoe ended this process") and found["ended"][1]["after"] > 5
    elif kind == "disk":
        assert codes == [1, 1] and found["left"] == [".saving-checkpoint-6", *FIRST]
        assert all(line[-1].endswith(f"rank {on[0]}: OSError: [Errno 27] File too large") for line in said)
    else:
        assert codes == [143, 143] and found["left"] == [*FIRST, "checkpoint-5"]
        assert "hf_longmoe stopped at SIGTERM, after step 5; saved in " in said[0][-1]
    if case.get("resume"):
        first = {"writing": 5, "renaming": 7, "term": 6}[kind]
        assert found["resumed"] == [0, 0]
        assert found["after"] == {str(step): whole["losses"][str(step)] for step in range(first, 8)}
        assert found["left_after"] == sorted({*ALL, *(["checkpoint-5"] if kind == "term" else [])})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_faults(few, name):
    check(few, name, CASES[name])


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MORE)
def test_more_faults(more, name):
    check(more, name, MORE[name])
