"""`PipelinedLLEP` on the experts modules of Transformers, float64, gloo ranks: the gradients of one process."""

import pytest

TIGHT, MIDDLE = 12_000, 40_000  # bytes: waves of a few rows; waves of some 15 rows
EVEN = {2: [24, 24], 4: [24, 24, 24, 24]}
UNEVEN = {2: [31, 0], 4: [30, 17, 0, 9]}
LEND = dict(imbalance=1.0, budget=60_000)
NEVER_LEND = dict(imbalance=100.0)
KERNELS = {
    "written out": dict(),
    "kernel": dict(kernel="model"),
    "gpt_oss": dict(family="gpt_oss"),
}
MODES = ["plain", "non-reentrant", "reentrant", "non-reentrant, bare", "reentrant, bare"]


def cases(ranks):
    """{name: case}; `pipelined_worker.py` says what the fields mean, `test_exact` what is asked of them."""
    even, uneven = dict(tokens=EVEN[ranks]), dict(tokens=UNEVEN[ranks])
    made = {}
    for kernel, options in KERNELS.items():
        for route in ("balanced", "skew", "one", "absent", *(["dropped"] if kernel != "gpt_oss" else [])):
            made[f"{kernel}, {route}"] = dict(uneven, **options, route=route, budget=MIDDLE, waves=2)
        made[f"{kernel}, nobody has tokens"] = dict(options, tokens=[0] * ranks, budget=MIDDLE)
        made[f"{kernel}, one wave"] = dict(uneven, **options, waves=1, exactly=True)
        for route in ("skew", "one"):
            made[f"{kernel}, lending, {route}"] = dict(even, **options, **LEND, route=route, waves=2, moves=1)
        made[f"{kernel}, never lending"] = dict(even, **options, **{**LEND, **NEVER_LEND}, route="skew", waves=2)
        made[f"{kernel}, least budget"] = dict(uneven, **options, budget="least", waves=3)
    for mode in MODES:
        again = "bare" in mode  # nothing tells a replay: it runs what it reaches, a re-entrant one everything
        for after in (False, True):
            made[f"{mode}, after={after}"] = dict(
                uneven,
                mode=mode,
                after=after,
                budget=MIDDLE,
                order="fbfb",
                waves=2,
                again=again and (after or mode[0] == "r"),
            )
        made[f"{mode}, both graphs alive"] = dict(
            uneven, **LEND, mode=mode, order="ffbb", route="one", moves=1, again=again and mode[0] == "r"
        )
    for overlap in (2, 3):
        made[f"overlap {overlap}"] = dict(uneven, overlap=overlap, budget=MIDDLE, waves=4)
        made[f"overlap {overlap}, lending"] = dict(
            even, overlap=overlap, imbalance=1.0, budget=100_000, route="one", mode="non-reentrant", waves=2, moves=1
        )
    if ranks == 4:
        for frozen in (["x"], ["w"], ["x", "w"], ["gate_up_proj"], ["down_proj"], ["gate_up_proj", "down_proj"]):
            for kernel in ("written out", "kernel"):
                made[f"{kernel}, frozen {' '.join(frozen)}"] = dict(
                    even, **KERNELS[kernel], **LEND, route="skew", frozen=frozen, mode="non-reentrant", moves=1
                )
    made["gpt_oss, frozen biases"] = dict(
        even, family="gpt_oss", **LEND, route="skew", frozen=["gate_up_proj_bias", "down_proj_bias"], moves=1
    )
    made["a shared norm"] = dict(uneven, family="muse_spark", budget=MIDDLE, waves=2)
    made["a shared norm, lending"] = dict(
        even, family="muse_spark", **LEND, route="one", mode="non-reentrant", waves=2, moves=1
    )
    made["a shared norm, frozen"] = dict(
        even, family="muse_spark", **LEND, route="skew", frozen=["post_expert_norm.weight"], moves=1
    )
    made["backward twice"] = dict(uneven, **LEND, route="one", order="fBb", moves=1)
    made["batched_mm"] = dict(even, kernel="model", implementation="batched_mm", budget=800_000, imbalance=1.0)
    made["one slot"] = dict(uneven, k=1, budget=MIDDLE)
    made["every expert"] = dict(uneven, k=8, budget=MIDDLE, waves=3)
    if ranks == 4:
        for mode in ("plain", "non-reentrant", "reentrant"):
            made[f"two expert groups, {mode}"] = dict(
                layout="pairs", mode=mode, tokens=UNEVEN[2], budget=MIDDLE, waves=2
            )
            made[f"two expert groups, {mode}, lending"] = dict(
                layout="pairs", mode=mode, tokens=EVEN[2], **LEND, route="one", waves=2, moves=1
            )
            for tokens in ([21, 10], [1, 0]):
                made[f"ranks share a batch, {mode}, {tokens}"] = dict(
                    layout="tp", mode=mode, tokens=tokens, **LEND, order="fbfb"
                )
    return made


CASES = {ranks: {f"{ranks} ranks, {name}": case for name, case in cases(ranks).items()} for ranks in (2, 4)}
# On two ranks `make test` has a case of each kind, on four all of one kernel and what the others have of their own.
KEPT = (
    "written out",
    "kernel, lending, one",
    "norm, lending",
    "gpt_oss, lending, skew",
    "entrant, after=",
    "overlap 3",
    "backward twice",
)
# Two ranks have these too.
TWICE = ("written out, one wave", "written out, absent", "written out, dropped", "written out, nobody has tokens")
LESS = ("balanced", "one", "absent", "dropped", "never lending", "frozen x", "frozen w", "frozen down_proj")
MORE = [name for name in CASES[2] if not any(part in name for part in KEPT)]
MORE += [f"2 ranks, {name}" for name in TWICE]
MORE += [f"4 ranks, {kernel}, {less}" for kernel in ("kernel", "gpt_oss") for less in LESS]
for mode in MODES[1:]:
    MORE += [f"4 ranks, {mode}, after=False", *([f"4 ranks, {mode}, both graphs alive"] if "bare" in mode else [])]
MORE += ["4 ranks, two expert groups, plain", "4 ranks, two expert groups, non-reentrant, lending"]
MORE += [f"4 ranks, ranks share a batch, {mode}, [1, 0]" for mode in ("plain", "reentrant")]


@pytest.fixture(scope="module")
def found(launch, selected):
    """{ranks: what each rank found}: one launch for each number of ranks."""
    return {ranks: launch("pipelined_worker.py", ranks, selected(CASES[ranks])) for ranks in (2, 4)}


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in (2, 4) for name in CASES[ranks]])
def test_exact(found, ranks, name):
    case = CASES[ranks][name]
    for rank, results in enumerate(found[ranks]):
        result = results[name]
        assert max(result["errors"].values()) <= 1e-12, (rank, result["errors"])
        forwards = case.get("order", "fb").count("f")
        assert result["routed"] == forwards * (2 if case.get("again") else 1)  # a replay does not route again
        waves = min(result["waves"])
        assert waves == case["waves"] if case.get("exactly") else waves >= case.get("waves", 0), result
        assert result["moves"] >= case.get("moves", 0), result
        if case.get("imbalance", 1.3) >= ranks:
            assert result["moves"] == 0
        if not sum(case["tokens"]):
            assert max(result["waves"]) == 0


@pytest.mark.parametrize("seeds", [40, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_seeds_of_routing(launch, seeds):
    """Sizes, budgets, skew and tokens at random on 4 ranks: none hangs, and all are exact."""
    found = launch("pipelined_worker.py", 4, {"seeds": dict(seeds=seeds)})
    for rank in found:
        assert rank["seeds"]["worst"] <= 1e-12
        assert rank["seeds"]["several waves"] > seeds / 4 and rank["seeds"]["lent"] > seeds / 10
