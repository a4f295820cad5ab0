"""What `ring_cross_entropy` holds on the worst rank and what it sends, in bytes."""

import pytest
import torch

from hf_longmoe.schedules.vocab.ring_plan import choose_travel, ring_bytes

RANKS, HIDDEN, BUDGET = 4, 40, 2**18
FEW, MANY, VOCAB = 240, 960, 448
DIRECTIONS = ("tokens", "weights")
WAYS = {
    "plain": {},
    "all of them": dict(masked="some", bias=True, softcap=5.0, smoothing=0.1, z_loss=0.01, items=[900] * RANKS),
    "frozen head, smoothing": dict(frozen=["shard"], smoothing=0.1),
    "frozen head, all of them": dict(frozen=["shard", "bias"], bias=True, masked="some", softcap=5.0, z_loss=0.01),
}
PEAKS = {
    f"{name}, {travel}, T {tokens}, V {vocab}": dict(
        kind="peak", vocab=vocab, tokens=[tokens] * RANKS, hidden=HIDDEN, travel=travel, budget=BUDGET, **way
    )
    for name, way in WAYS.items()
    for travel in DIRECTIONS
    for tokens, vocab in ((FEW, VOCAB), (MANY, VOCAB), (FEW, 2 * VOCAB))
}
HALF = {
    f"bf16, {travel}": dict(
        kind="peak", vocab=VOCAB, tokens=[MANY] * RANKS, hidden=HIDDEN, travel=travel, budget=BUDGET, dtype="bfloat16"
    )
    for travel in DIRECTIONS
}
SENT = {
    f"{name}, {travel}, {dtype}": dict(
        kind="sent", vocab=256, tokens=tokens, hidden=32, budget=60_000, travel=travel, dtype=dtype, frozen=frozen
    )
    for name, tokens, frozen in (
        ("even", [24] * RANKS, []),
        ("uneven", [13, 0, 25, 40], []),
        ("more tokens", [100] * RANKS, []),
        ("frozen head", [24] * RANKS, ["shard"]),
        ("frozen hidden", [24] * RANKS, ["hidden"]),
        ("all frozen", [24] * RANKS, ["hidden", "shard"]),
    )
    for travel in (*DIRECTIONS, "auto")
    for dtype in (("float32", "bfloat16") if name in ("even", "frozen head") and travel != "auto" else ("float32",))
}


# Of a frozen head hidden states alone get gradients: `make test` has that where tokens travel.
LESS = ("frozen head, smoothing, weights", "frozen head, all of them, weights")
MORE = [name for name in PEAKS if name.startswith(LESS)]
THREE = [
    [f"{way}, {travel}, T {tokens}, V {vocab}" for tokens, vocab in ((FEW, VOCAB), (MANY, VOCAB), (FEW, 2 * VOCAB))]
    for way in WAYS
    for travel in DIRECTIONS
]


@pytest.fixture(scope="module")
def found(launch, selected):
    return launch("ring_bytes_worker.py", RANKS, selected({**PEAKS, **HALF, **SENT}), timeout=250)


def worst(found, name, what):
    return max(rank[name][what] for rank in found)


@pytest.mark.parametrize("names", THREE, ids=lambda names: names[0].partition(", T")[0])
def test_neither_tokens_nor_vocabulary_are_in_the_peak(found, names):
    for what in ("beyond", "beside"):
        few, many, wide = (worst(found, name, what) for name in names)
        assert many <= 1.02 * few + 16 * (MANY - FEW)
        assert wide <= 1.02 * few
        assert few > BUDGET / 4  # or there is nothing that could grow


@pytest.mark.parametrize("name", PEAKS)
def test_the_budget_bounds_what_is_beside_gradients(found, name):
    tokens = PEAKS[name]["tokens"][0]
    assert worst(found, name, "beside") <= BUDGET + 16 * tokens


@pytest.mark.parametrize("name", HALF)
def test_half_precision_holds_gradients_in_float32_beside(found, name):
    gradients = 4 * HIDDEN * (MANY + VOCAB // RANKS)
    assert gradients < worst(found, name, "beside") <= BUDGET + 16 * MANY + gradients


@pytest.mark.parametrize("name", PEAKS)
def test_no_storage_is_as_large_as_the_weight(found, name):
    largest = worst(found, name, "largest")
    own = max(PEAKS[name]["tokens"][0], PEAKS[name]["vocab"] // RANKS) * HIDDEN * 4
    assert largest <= max(own, BUDGET // 2)
    if PEAKS[name]["tokens"][0] == FEW:
        assert largest < PEAKS[name]["vocab"] * HIDDEN * 4


@pytest.mark.parametrize("name", SENT)
def test_bytes_sent_are_the_formulas(found, name):
    case = SENT[name]
    tokens, vocab, size = sum(case["tokens"]), case["vocab"], 2 if "bfloat16" in name else 4
    needs = ["hidden" not in case["frozen"], "shard" not in case["frozen"]]

    def by(travel):  # of all ranks
        moving, returns = (tokens, needs[0]) if travel == "tokens" else (vocab, needs[1])
        return ring_bytes(
            travel, moving, case["hidden"], RANKS, size, 4, backward=any(needs), returns=returns, frozen=one_pass
        )

    one_pass = needs == [True, False]
    cheaper = min(("weights", "tokens"), key=by)
    assert choose_travel(tokens, vocab, RANKS, getattr(torch, case["dtype"]), needs, one_pass) == cheaper
    travel = cheaper if case["travel"] == "auto" else case["travel"]
    rows, few = (
        sum(rank[name][part].get(kind, 0) for rank in found for part in ("forward", "backward"))
        for kind in ("rows", "few")
    )
    assert rows == by(travel) > 0
    passes = 2 if any(needs) and not one_pass else 1
    labels, statistics = 8 * (RANKS - 1) * passes, 12 * RANKS + 12 * (RANKS - 1) * (passes - 1)
    assert few == (tokens * (labels + statistics) if travel == "tokens" else 0)
    assert all(rank[name]["forward"]["gather"] == 1 and "gather" not in rank[name]["backward"] for rank in found)
    if len(set(case["tokens"])) == 1:  # then no rank sends more than another
        assert len({rank[name]["all"] for rank in found}) == 1


def test_the_cheaper_way_is_taken():
    both = [True, True, False]
    assert choose_travel(1000, 1001, 4, torch.float32, both, one=False) == "tokens"
    assert choose_travel(1001, 1000, 4, torch.float32, both, one=False) == "weights"
    # Nothing returns with what travels, so that it may be more.
    assert choose_travel(1000, 1500, 2, torch.float32, [False, True, False], one=False) == "tokens"
    assert choose_travel(1500, 1000, 2, torch.float32, [False, True, False], one=False) == "tokens"
    assert choose_travel(1000, 1500, 2, torch.float32, [True, False, False], one=False) == "weights"
