"""A resumed run has the losses of one that was not stopped: their bits on the same ranks, or equal to rounding."""

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOUR, TWO, ONE = {"ranks": 4, "ep": 2}, {"ranks": 2}, {"ranks": 1}
SHARING = {"ranks": 2, "cp": 2}
ROUTES = {"from 4": [FOUR, [TWO, ONE], {"streaming": True}]}
MORE_ROUTES = {
    "from 2": [TWO, [FOUR, {"ranks": 4}, ONE], {}],
    "streaming": [TWO, [FOUR, ONE], {"streaming": True}],
    "bfloat16": [TWO, [TWO, FOUR, ONE], {"streaming": True, "dtype": "bfloat16"}],
    "sharing sequences": [SHARING, [SHARING, {"ranks": 4, "ep": 2, "cp": 2}, ONE], {"streaming": True}],
    "from 4 plain": [{"ranks": 4}, [TWO, FOUR, ONE], {}],
}


@pytest.fixture
def worker(python, tmp_path):
    """`worker(seconds, **cases)` -> what `resume_worker.py` found."""

    def worker(seconds, **cases):
        (tmp_path / "cases.json").write_text(json.dumps(cases))
        run = python(HERE / "resume_worker.py", tmp_path, timeout=seconds)
        assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
        return json.loads((tmp_path / "results.json").read_text())

    return worker


def check_trials(found):
    assert all(codes == [0, 0] for codes in found["references"].values())
    for trial in found["trials"]:
        whole = found["losses"][trial["reference"]]
        assert len(whole) == 7
        if trial["killed"] != [0, 0]:  # it may have come to its end before
            assert [trial["killed"][victim] for victim in trial["victims"]] == [-9] * len(trial["victims"])
            assert all(code in (-9, 1) for code in trial["killed"]), trial["said"]
            assert all("another rank failed" in said.strip().splitlines()[-1] for said in trial["said"])
        assert trial["resumed"] == [0, 0], trial["failed"]
        assert trial["before"] == {step: whole[step] for step in trial["before"]}
        assert trial["last"] >= 2 * ((len(trial["before"]) - 1) // 2)  # at most one checkpoint was being written
        after = {step: loss for step, loss in trial["after"].items() if int(step) <= 7}  # of a whole run: one more
        assert after == {step: loss for step, loss in whole.items() if int(step) > trial["last"]}


def check_route(found, steps=(5, 6, 7), tolerance=1e-6):
    assert not any(found["codes"]), found["said"]
    assert len(found["tensors"]) == 21 and all(found["tensors"].values())
    assert len(found["experts"]) == 2 * 2 * 4 * 3 and all(found["experts"].values())
    for resumed in found["resumed"].values():
        assert not any(resumed["codes"]), resumed["said"]
        assert sorted(map(int, resumed["losses"])) == list(steps)
        for step, loss in resumed["losses"].items():
            whole = float.fromhex(found["losses"][step])
            assert abs(float.fromhex(loss) - whole) <= tolerance * whole


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_a_random_step(worker):
    check_trials(worker(800, trials=[0, 2, 4])["trials"])


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
def test_killed_at_a_random_step_in_20_trials(worker):
    found = worker(2800, trials=list(range(20)))["trials"]
    check_trials(found)
    assert sum(trial["killed"] != [0, 0] for trial in found["trials"]) >= 15


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_another_number_of_ranks(worker):
    for found in worker(800, other_ranks=ROUTES)["other_ranks"].values():
        check_route(found)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_on_more_numbers_of_ranks(worker):
    for name, found in worker(1700, other_ranks=MORE_ROUTES)["other_ranks"].items():
        check_route(found, tolerance=1e-3 if name == "bfloat16" else 1e-6)
        saved, (first, *_), _ = MORE_ROUTES[name]
        if first == saved:  # on the same ranks: its very bits
            resumed = found["resumed"][f"{name}-on-{saved['ranks']}"]["losses"]
            assert resumed == {step: found["losses"][step] for step in resumed}
