"""`PipelinedLLEP`: what goes over the wire and when, a router that flips, refusals, and a rank that fails."""

import pytest

HIDDEN, WIDTH = 16, 12
FORWARD, OUT, BACK, EXPERT = HIDDEN, 2 * HIDDEN + 1, HIDDEN + 1, 3 * HIDDEN * WIDTH  # numbers of a row, float64
COUNTS = {
    f"counts, {name}": dict(kind="counts", pinned=pinned, budget=budget, imbalance=imbalance)
    for name, pinned, budget, imbalance in [
        ("one wave", True, "1GiB", 100.0),
        ("several waves", True, 40_000, 100.0),
        ("several waves, not pinned", False, 40_000, 100.0),
        ("lending", True, 60_000, 1.0),
    ]
}
FLIPS = {
    f"flip, {'re-entrant' if reentrant else 'non-reentrant'}, {'pinned' if pinned else 'not pinned'}": dict(
        kind="flip", reentrant=reentrant, pinned=pinned
    )
    for reentrant in (False, True)
    for pinned in (True, False)
}
DIFFERENT = {
    "dispatch.budget": dict(config=dict(budget=80_000)),
    "dispatch.overlap": dict(config=dict(overlap=2, budget=57_000)),
    "dispatch.imbalance": dict(config=dict(imbalance=2.0)),
    "the slots of a token": dict(k=2),
    "in the hidden states": dict(dtype="float64"),
    "in the experts": dict(experts="float16", usual="bfloat16"),  # as many bytes
    "whether the experts need gradients": dict(frozen=True),
}
REFUSED = {f"refused, {name}": dict(kind="refused", **case) for name, case in DIFFERENT.items()}
BATCHES = {
    "batches, the same": dict(kind="batches", odd=[], tokens=40),
    "batches, the same but for rounding": dict(kind="batches", odd=[], tokens=40, noise=1e-3),
    "batches, none has tokens": dict(kind="batches", odd=[], tokens=0),
    "batches, all groups": dict(kind="batches", odd=[1, 3], tokens=40),
    "batches, one group": dict(kind="batches", odd=[1], tokens=40),
    "batches, many tokens": dict(kind="batches", odd=[1, 3], tokens=4_000),
    "batches, another length": dict(kind="batches", odd=[3], tokens=40, more=1),
}
FAILS = {
    f"fails, {within}, {kernel}, {'lending' if imbalance == 1 else 'not lending'}, {after} done": dict(
        kind="fails", within=within, kernel=kernel, imbalance=imbalance, after=after
    )
    for within in ("forward", "backward")
    for kernel, imbalance, after in [("auto", 100.0, 0), ("auto", 1.0, 3), ("model", 1.0, 1)]
}

BORROWED = {f"borrowed, {name}": dict(kind="borrowed", train=name == "trained") for name in ("trained", "frozen")}


def cases(ranks):
    return {**BORROWED, **COUNTS, **FLIPS, **REFUSED, **BATCHES, **FAILS}


@pytest.fixture(scope="module")
def found(launch):
    """What each of four ranks found. Nobody may wait for a rank that has failed: the launch would time out."""
    return launch("pipelined_wire_worker.py", 4, cases(4))


@pytest.mark.parametrize("name", COUNTS)
def test_a_step_exchanges_each_wave_twice_in_each_direction(found, name):
    for rank in found:
        result = rank[name]
        waves, lends = result["waves"], COUNTS[name]["imbalance"] == 1
        assert (waves > 1) == (name != "counts, one wave")
        assert (result["fetching"] > 0) == (result["returning"] > 0) == lends
        forward = {"gather": 1, str(FORWARD): 2 * waves, str(EXPERT): result["fetching"]}
        backward = {str(OUT): waves, str(BACK): waves, str(EXPERT): result["fetching"] + result["returning"]}
        assert result["forward"] == {call: n for call, n in forward.items() if n}
        assert result["backward"] == {call: n for call, n in backward.items() if n}  # no gather, no second forward


@pytest.mark.parametrize("name", BORROWED)
def test_borrowed_experts_stay_within_their_cap_trained_or_frozen(found, name):
    for rank in found:
        result = rank[name]
        assert result["moves"] > 4 and result["held"] <= result["cap"]
    assert max(rank[name]["held"] for rank in found) > 0


@pytest.mark.parametrize("name", FLIPS)
def test_a_flip_of_near_ties_in_the_replay_changes_nothing(found, name):
    for rank in found:
        assert rank[name]["asked"] == 1
        worst = max(rank[name]["errors"])
        assert worst <= 1e-12 if FLIPS[name]["pinned"] else worst > 1e-2  # so that the first can fail


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_are_refused_on_every_rank_before_a_row_moves(found, name):
    for rank in found:
        result = rank[f"refused, {name}"]
        assert result["error"] and result["error"].startswith("The ranks of the expert group differ in ")
        assert name in result["error"].split(":")[0]
        assert result["calls"] == {"gather": 1}


def test_ranks_that_share_a_batch(found):
    for name in ("the same", "the same but for rounding", "none has tokens"):
        assert [rank[f"batches, {name}"] for rank in found] == [None] * 4


@pytest.mark.parametrize("name", ["all groups", "one group", "many tokens", "another length"])
def test_different_batches_in_a_tensor_parallel_group_are_refused(found, name):
    odd = BATCHES[f"batches, {name}"]["odd"]
    message = "tensor-parallel group were given different batches"
    for number, rank in enumerate(found):
        said = rank[f"batches, {name}"] or "nothing"
        its_own = any(number // 2 == other // 2 for other in odd)
        assert message in said and said.startswith("ValueError" if its_own else "PeerError"), said


@pytest.mark.parametrize("name", FAILS)
def test_a_rank_that_fails_ends_the_others_with_its_message(found, name):
    for number, rank in enumerate(found):
        said = rank[name]
        broken = "ArithmeticError: the kernel has broken"
        its = f"PeerError: hf_longmoe stopped, since another rank failed. rank 1: {broken}"
        assert said == {"forward": None, "backward": None, FAILS[name]["within"]: broken if number == 1 else its}
