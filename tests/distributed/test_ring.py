"""`ring_cross_entropy` over gloo ranks: exact beside one process, in whatever way it travels; what it refuses."""

import math

import pytest

UNEVEN = [13, 0, 25, 40]
ALL = dict(bias=True, masked="some", softcap=5.0, scale=0.5, smoothing=0.1, z_loss=1e-2, items=[7, 7, 9, 9])
WHAT = {
    "plain": {},
    "even": dict(tokens=[24] * 4),
    "9 entries": dict(vocab=9),
    "64 entries": dict(vocab=64),
    "no tokens": dict(tokens=[0] * 4, bias=True),
    "some masked": dict(masked="some"),
    "a rank masked": dict(masked=[2], bias=True),
    "all masked": dict(masked=[0, 1, 2, 3], bias=True, softcap=3.0),
    "bias": dict(bias=True),
    "softcap": dict(softcap=2.0),
    "scale": dict(scale=0.25),
    "smoothing": dict(smoothing=0.2),
    "z-loss": dict(z_loss=0.05),
    "all of them": ALL,
    "all of them, 9 entries": dict(ALL, vocab=9),
    "all of them, one block": dict(ALL, budget="1MiB"),
    "items as a tensor": dict(items=[3, 5, 50, 6], items_as_tensor=True),
    "frozen hidden": dict(frozen=["hidden"], bias=True),
    "frozen bias": dict(frozen=["bias"], bias=True),
    "only the bias": dict(frozen=["hidden", "shard"], bias=True),
    "frozen weight, trained bias": dict(frozen=["shard"], bias=True, masked="some"),
    "all frozen": dict(frozen=["hidden", "shard", "bias"], bias=True),
    "accumulation": dict(ALL, steps=3),
    "backward twice": dict(ALL, twice=True),
    "no_grad": dict(ALL, no_grad=True),
    "weight_scale": dict(bias=True, weight_scale=0.25),
    "the same bits again": dict(ALL, again=True),
}
# The gradient of the hidden states alone: one pass, but for smoothing under a soft cap.
FROZEN = dict(frozen=["shard", "bias"])
CAPPED = dict(FROZEN, bias=True, masked="some", softcap=2.0, scale=0.5, z_loss=1e-2, items=[7, 7, 9, 9])
WHAT |= {
    "frozen head": FROZEN,
    "frozen head, some masked": dict(FROZEN, masked="some"),
    "frozen head, a rank masked": dict(FROZEN, masked=[2]),
    "frozen head, all masked": dict(FROZEN, masked=[0, 1, 2, 3]),
    "frozen head, no tokens": dict(FROZEN, tokens=[0] * 4),
    "frozen head, capped": CAPPED,
    "frozen head, capped, 9 entries": dict(CAPPED, vocab=9),
    "frozen head, capped, one block": dict(CAPPED, budget="1MiB"),
    "frozen head, capped, twice": dict(CAPPED, twice=True),
    "frozen head, capped, accumulation": dict(CAPPED, steps=2),
    "frozen head, capped, the same bits again": dict(CAPPED, again=True),
    "frozen head, smoothing": dict(FROZEN, smoothing=0.2, scale=0.5, z_loss=0.05, masked="some"),
    "frozen head, smoothing, 9 entries": dict(FROZEN, smoothing=0.2, vocab=9),
    "frozen head, all of them": {**ALL, **FROZEN},
}
DIRECTIONS = ("tokens", "weights")
EXACT = {
    f"{name}, {travel}": dict(kind="exact", **{**dict(vocab=101, tokens=UNEVEN, travel=travel), **case})
    for name, case in WHAT.items()
    for travel in DIRECTIONS
}
# Ranks with the same tokens: nothing travels but sums.
EXACT |= {
    f"{name}, same tokens": dict(
        kind="exact",
        **{**dict(vocab=101, travel="auto"), **case, "tokens": [78], "same": True, "masked": masked, "items": items},
    )
    for name, case in WHAT.items()
    if name not in ("even", "no tokens", "weight_scale")
    for masked, items in [("some" if case.get("masked") else (), [7] * 4 if case.get("items") else None)]
}
EXACT["no tokens, same tokens"] = dict(kind="exact", vocab=101, travel="auto", tokens=[0], same=True, bias=True)
LARGE = {
    f"32001 entries, {travel}": dict(
        kind="exact", vocab=32_001, tokens=[40, 24, 9, 0], travel=travel, dtype="float32", budget="256KiB"
    )
    for travel in DIRECTIONS
}
HALF = {
    f"{name}, {travel}": dict(
        kind="half", vocab=257, hidden=32, tokens=[24] * 4, travel=travel, budget=60_000, items=[96] * 4, **case
    )
    for name, case in {"bf16": {}, "bf16, frozen": dict(frozen=["shard"])}.items()
    for travel in DIRECTIONS
}
HALF |= {
    f"{name}, same tokens": {**case, "tokens": [96], "same": True, "items": [96] * 4, "travel": "auto"}
    for name, case in {"bf16": HALF["bf16, tokens"], "bf16, frozen": HALF["bf16, frozen, tokens"]}.items()
}
SMALL = dict(kind="fails", vocab=101, tokens=[13, 8, 25, 40], travel="tokens")
LABELS = "labels of rank 1 of the ring contain {}, outside the vocabulary [0, 101)"
# On every rank alike.
ALIKE = {
    "a label too large": (dict(label=101), LABELS.format(101)),
    "a label below zero": (dict(label=-3), LABELS.format(-3)),
    "budgets": (dict(budget=40_000), "ranks of the ring differ in vocab.budget"),
    "travel": (dict(travel="weights"), "ranks of the ring differ in travel"),
    "bias": (dict(bias=True), "ranks of the ring differ in whether there is a bias"),
    "frozen": (dict(frozen=["shard"]), "ranks of the ring differ in whether the weight needs a gradient"),
    "the soft cap": (dict(transform=dict(softcap=3.0)), "ranks of the ring differ in transform"),
    "same tokens": (dict(same_tokens=True), "ranks of the ring differ in "),
    "smoothing": (dict(label_smoothing=0.5), "ranks of the ring differ in transform, label_smoothing or z_loss"),
}
# On rank 1, whose message the others get.
ALONE = {
    "dtype": (dict(dtype="float32"), "dtypes differ (hidden float32, weight float64)"),
    "unknown travel": (dict(travel="both"), "travel='both' is unknown; choose one of auto, tokens, weights"),
    "small budget": (dict(budget=100), "vocab.budget=100 (100 B) is too small"),
    "no items": (dict(num_items=0), "num_items=0, but 8 tokens have labels"),
    "negative smoothing": (dict(label_smoothing=-1.0), "label_smoothing=-1.0 must be in [0, 1]"),
}
REFUSED = {f"refused, {name}": dict(SMALL, odd=odd) for name, (odd, _) in {**ALIKE, **ALONE}.items()}
BREAKS = {
    f"breaks in {within}, {travel}": dict(SMALL, breaks=within, after=3, all=dict(travel=travel))
    for within in ("forward", "backward")
    for travel in DIRECTIONS
}
OTHERS = {"create_graph": dict(SMALL, create_graph=True)}
PAIR = {
    f"{name}, {travel}": {**EXACT[f"{name}, {travel}"], "tokens": [13, 30], "items": [7, 9], "masked": "some"}
    for name in ("plain", "all of them", "frozen head", "frozen head, capped", "frozen head, smoothing")
    for travel in DIRECTIONS
}


# What "all of them" has too, and what is the same in every direction: `make test` has it where tokens travel.
LESS = ("even", "64 entries", "some masked", "bias", "softcap", "scale", "smoothing", "z-loss", "items as a tensor")
LESS += ("frozen bias", "the same bits again", "frozen head, some masked", "frozen head, capped, one block")
LESS += ("frozen head, capped, accumulation", "plain", "9 entries", "a rank masked", "frozen hidden", "only the bias")
LESS += ("weight_scale", "frozen head, a rank masked", "frozen head, capped", "frozen head, capped, 9 entries")
LESS += ("frozen head, smoothing, 9 entries", "frozen head, capped, twice", "accumulation")
LESS += ("frozen head, capped, the same bits again",)
MORE = [f"{name}, {travel}" for name in LESS for travel in ("weights", "same tokens")] + ["32001 entries, weights"]


@pytest.fixture(scope="module")
def four(launch, selected):
    cases = selected({**EXACT, **LARGE, **HALF, **REFUSED, **BREAKS, **OTHERS})
    return launch("ring_worker.py", 4, cases, timeout=280)


@pytest.fixture(scope="module")
def two(launch):
    return launch("ring_worker.py", 2, PAIR)


@pytest.mark.parametrize("name", EXACT)
def test_exact_beside_one_process(four, name):
    expected = 1 if "no_grad" in name or "all frozen" in name else 2
    for rank in four:
        assert len(rank[name]) >= expected and max(rank[name]) <= 1e-12, rank[name]


@pytest.mark.parametrize("name", LARGE)
def test_a_vocabulary_that_nothing_divides(four, name):
    assert all(max(rank[name]) <= 1e-5 for rank in four)


@pytest.mark.parametrize("name", PAIR)
def test_exact_on_two_ranks(two, name):
    assert all(len(rank[name]) >= 2 and max(rank[name]) <= 1e-12 for rank in two)


@pytest.mark.parametrize("name", HALF)
def test_half_precision_errs_no_more_than_stock(four, name):
    for place, gradient in enumerate(("dh", "dW")):
        ours, stock = (math.sqrt(sum(rank[name][path][place] for rank in four)) for path in ("ours", "stock"))
        assert stock > 0
        if gradient == "dW" and "frozen" in name:
            assert ours == 0
        else:
            assert 0 < ours <= 1.05 * stock


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_refused_on_every_rank(four, name):
    for rank in four:
        said = rank[f"refused, {name}"]
        assert said and said.startswith("ValueError: ") and ALIKE[name][1] in said, said


@pytest.mark.parametrize("name", ALONE)
def test_what_a_rank_refuses_alone_ends_the_others(four, name):
    for number, rank in enumerate(four):
        said = rank[f"refused, {name}"]
        assert said and said.startswith(("ValueError", "TooSmall") if number == 1 else "PeerError"), said
        assert ALONE[name][1] in said, said


@pytest.mark.parametrize("name", BREAKS)
def test_a_rank_that_breaks_ends_the_others_with_its_message(four, name):
    for number, rank in enumerate(four):
        said = rank[name]
        assert said and said.startswith("ArithmeticError" if number == 1 else "PeerError"), said
        assert "the product has broken" in said


def test_a_second_derivative_is_refused(four):
    for rank in four:
        assert "ring_cross_entropy has no second derivative" in rank["create_graph"]
