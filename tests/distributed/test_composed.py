"""Everything at once: sequence, expert and data parallelism on the same ranks, all schedules, under the Trainer."""

import itertools
import math

import pytest

ALL = ["dispatch", "vocab", "boundaries", "optimizer"]
AUX = 0.3


def case(trainer, steps, accumulation, groups=1, **options):
    samples = steps * accumulation * groups
    return {"trainer": trainer, "steps": steps, "accumulation": accumulation, "samples": samples, "on": [], **options}


ONE = {
    "stock": case("stock", 4, 4, gradients=True, evaluated=True),
    "stock, short": case("stock", 2, 2, gradients=True, evaluated=True),
    "stock, aux": case("stock", 2, 1, aux=AUX, evaluated=True),
    "stock, aux, accumulated": case("stock", 1, 2, aux=AUX),
    "aux, accumulated": case("ours", 2, 2, aux=AUX, on=["dispatch"], sharded=False),
    "aux, accumulated, not patched": case("ours", 1, 2, aux=AUX, sharded=False),
}
PAIRS = {", ".join(pair): case("ours", 2, 2, cp=2, on=pair) for pair in itertools.combinations(ALL, 2)}
TWO = {
    **PAIRS,
    "none": case("ours", 2, 2, cp=2),
    "launch keys": case("ours", 2, 2, cp=2, on=ALL, gradients=True, **{"launch keys": True}),
    "DDP": case("ours", 2, 2, cp=2, on=["dispatch", "vocab"], sharded=False),
    "aux": case("ours", 2, 1, cp=2, on=ALL, aux=AUX, evaluated=True),
    "aux, accumulated": case("ours", 2, 2, cp=2, on=["dispatch"], aux=AUX),
    "aux, data ranks": case("ours", 2, 1, groups=2, on=["dispatch"], aux=AUX),
    "aux, data ranks, not patched": case("ours", 2, 1, groups=2, aux=AUX, sharded=False),
    "bfloat16": case("ours", 2, 2, cp=2, on=ALL, dtype="bfloat16"),
}
FOUR = {
    "cp 2 x 2 groups": case("ours", 4, 2, groups=2, cp=2, on=ALL, gradients=True, evaluated=True),
    "cp 4": case("ours", 1, 4, cp=4, on=ALL, gradients=True),
    "experts over pairs": case("ours", 2, 1, groups=2, cp=2, ep=2, on=ALL, gradients=True, evaluated=True),
    "aux": case("ours", 2, 1, groups=2, cp=2, on=ALL, aux=AUX, streamed=True),
}
MORE = [name for name in PAIRS if name not in ("dispatch, optimizer", "vocab, boundaries")]


@pytest.fixture(scope="module")
def one(launch):
    return launch("composed_worker.py", 1, ONE, timeout=300)[0]


@pytest.fixture(scope="module")
def two(launch, selected):
    return launch("composed_worker.py", 2, selected(TWO), timeout=600)


@pytest.fixture(scope="module")
def four(launch):
    return launch("composed_worker.py", 4, FOUR, timeout=600)


def check(got, want, case):
    """Losses at every step and in evaluation, gradients of the first, and that everything is on, and off again."""
    for rank in got:
        losses = want["losses"][: case["steps"]]
        assert len(set(losses)) == case["steps"]
        assert rank["losses"][0] == pytest.approx(losses[0], rel=1e-6)
        assert rank["losses"] == pytest.approx(losses, rel=1e-4)
        if case.get("evaluated"):
            assert rank["evaluation"] == pytest.approx(want["evaluation"], rel=1e-4)
        cp = case.get("cp", 1)
        assert rank["shared"] == (cp > 1) and rank["implementation"] == "sdpa"
        assert rank["streamed"] == ["OffloadStreamAdamW" if "optimizer" in case["on"] else "AdamW"]
        assert rank["left"] == [0, 0, False]
        schedules = "\n".join(rank.get("schedules", ()))
        if case.get("sharded", True):
            assert ("PipelinedLLEP" in schedules) == ("dispatch" in case["on"])
            assert ("vocab, ring (" in schedules) == ("vocab" in case["on"])
        if case.get("aux") and "dispatch" in case["on"]:
            assert "aux, sums by layer" in schedules
        if "boundaries" in case["on"]:
            assert rank["offloaded"] == 2  # of three layers; the last stays
    if case.get("gradients"):
        assert got[0]["gradients"].keys() == want["gradients"].keys()
        for name, gradient in want["gradients"].items():
            error = max(abs(a - b) for a, b in zip(got[0]["gradients"][name], gradient, strict=True))
            assert error <= 1e-5 * max(map(abs, gradient)), name


@pytest.mark.parametrize("name", [*PAIRS, "none", "launch keys", "DDP"])
def test_two_ranks(one, two, name):
    check([rank[name] for rank in two], one["stock, short"], TWO[name])


@pytest.mark.parametrize("name", ["cp 2 x 2 groups", "cp 4"])
def test_all_at_once_on_four_ranks(one, four, name):
    check([rank[name] for rank in four], one["stock"], FOUR[name])


def test_experts_over_fewer_ranks_than_the_model(one, four):
    check([rank["experts over pairs"] for rank in four], one["stock, short"], FOUR["experts over pairs"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["cp 2 x 2 groups", "cp 4"])
def test_twenty_steps(launch, name):
    stock, ours = ({**case, "steps": 20, "samples": 80, "evaluated": True} for case in (ONE["stock"], FOUR[name]))
    (want,) = launch("composed_worker.py", 1, {"long": stock}, timeout=300)
    check([rank["long"] for rank in launch("composed_worker.py", 4, {"long": ours}, timeout=600)], want["long"], ours)


def test_bfloat16(one, two):
    for rank in two:
        losses = rank["bfloat16"]["losses"]
        assert all(map(math.isfinite, losses)) and losses == pytest.approx(one["stock, short"]["losses"], rel=0.01)


def test_the_auxiliary_loss_is_of_whole_sequences(one, two):
    check([rank["aux"] for rank in two], one["stock, aux"], TWO["aux"])


def test_the_auxiliary_loss_is_a_mean(one, two, four):
    """Over micro-batches and over data ranks, each once; at the first step against the stock Trainer's sum."""
    plain, summed = one["stock, short"]["losses"][0], one["stock, aux, accumulated"]["losses"][0]
    for name in ("aux, accumulated", "aux, accumulated, not patched"):
        first = one[name]["losses"][0]
        assert summed - plain > 0.1 and first - plain == pytest.approx((summed - plain) / 2, rel=1e-4)
    want = one["aux, accumulated"]
    for name in ("aux, accumulated", "aux, data ranks", "aux, data ranks, not patched"):
        check([rank[name] for rank in two], want, TWO[name])
    check([rank["aux"] for rank in four], want, FOUR["aux"])
