"""The exchange plan on routings that one can reason about, and its parts alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longmoe.schedules.dispatch.exchange import ExchangeCaps, plan_exchange
from hf_longmoe.schedules.dispatch.placement import place
from hf_longmoe.schedules.dispatch.queues import Queues, prefixes
from hf_longmoe.schedules.dispatch.repair import repair

GENEROUS = 10**9
TOKENS, EXPERTS, SLOTS, RANKS, CHUNKS = 65_536, 128, 8, 8, 10
PROFILES = [None, (0.95, 16), (0.80, 16), (0.50, 4), (0.30, 16)]


def profile(share, hot):
    """[TOKENS, SLOTS] experts: the first share of the tokens go to the hot experts, the others to the rest."""
    token, slot = np.arange(TOKENS)[:, None], np.arange(SLOTS)
    cold = hot + (token + slot) % (EXPERTS - hot)
    return np.where(token < int(share * TOKENS), slot % hot, cold) if hot else cold


def most(pace):
    takes = np.diff(pace, axis=0)
    return max(takes.sum(1).max(), takes.sum(2).max())


@pytest.mark.parametrize("shape", PROFILES)
def test_send_ratio_of_the_papers_profiles(shape):
    counts = np.tile(np.bincount(profile(*shape or (0, 0)).reshape(-1), minlength=EXPERTS), (RANKS, 1))
    plan = plan_exchange(counts, ExchangeCaps(rows=TOKENS * SLOTS // CHUNKS + 64, foreign=GENEROUS))
    sends = np.array([[plan.send_splits(r, w) for r in range(RANKS)] for w in range(plan.num_waves)])
    assert plan.num_waves == plan.lower_bound == CHUNKS
    assert max(plan.load) - min(plan.load) <= (RANKS if shape else 0)
    assert (sends.max(2) / sends.mean(2)).max() <= 1.02


@pytest.mark.parametrize(("shape", "ratio"), list(zip(PROFILES, [1.00, 1.35, 2.40, 2.29, 1.41], strict=True)))
def test_send_ratio_of_strided_chunks(shape, ratio):
    # What the paper prints for chunks of every tenth token, for comparison; the last figure is ours. Rows of an expert
    # are numbered one source after the other, and its home and helpers take ranges of them, as in LLEP.
    experts = profile(*shape or (0, 0))
    own = np.bincount(experts.reshape(-1), minlength=EXPERTS)
    placed = place(own * RANKS, RANKS, TOKENS * SLOTS)
    order = np.argsort(experts.reshape(-1), kind="stable")
    segments = np.lexsort((placed.start, placed.expert))
    ends = (placed.stop - placed.start)[segments].cumsum()
    first = np.repeat(own.cumsum() - own, own)
    sends = np.empty((CHUNKS, RANKS, RANKS))
    for source in range(RANKS):
        row = first * RANKS + source * np.repeat(own, own) + np.arange(experts.size) - first
        to = np.empty(experts.size, dtype=np.int64)
        to[order] = placed.destination[segments][np.searchsorted(ends, row, side="right")]
        for chunk in range(CHUNKS):
            members = to.reshape(experts.shape)[chunk::CHUNKS]
            sends[chunk, source] = np.bincount(members.reshape(-1), minlength=RANKS)
    worst = (sends.max(2) / sends.mean(2)).max()
    assert worst == pytest.approx(ratio, abs=0.01)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_expert_per_source_and_destination(ranks):
    # Loads are balanced, but in equal ranges all destinations take from one source at a time.
    rows, bound = 1000 * ranks, ranks
    counts = np.zeros((ranks, ranks * ranks), dtype=np.int64)
    for source in range(ranks):
        counts[source, np.arange(ranks) * ranks + source] = rows
    limit = rows * ranks // bound
    placed = place(counts.sum(0), ranks, rows * ranks)
    assert most(Queues(counts, placed).by_ranges(bound)) == ranks * limit
    plan = plan_exchange(counts, ExchangeCaps(rows=limit))
    assert plan.num_waves == plan.lower_bound == bound


def test_balanced_routing_lends_nothing_and_takes_one_wave_if_it_fits():
    counts = np.full((4, 16), 25)
    plan = plan_exchange(counts, ExchangeCaps(rows=400, foreign=GENEROUS, imbalance=1))
    assert (plan.num_waves, plan.lower_bound, plan.moves) == (1, 1, [])
    assert plan.sends(1, 0) == [(e, 0, 25) for e in range(16)]
    assert plan.receives(2, 0) == [(e, [25] * 4) for e in range(8, 12)]
    assert plan_exchange(counts, ExchangeCaps(rows=399)).num_waves == 2
    assert plan_exchange(counts * 0, ExchangeCaps(rows=4)).num_waves == 0


def test_one_hot_expert_is_shared_as_far_as_foreign_bytes_go():
    counts = np.zeros((4, 8), dtype=np.int64)
    counts[:, 0] = 300
    caps = {"rows": 100, "weight_bytes": 2, "gradient_bytes": 3}
    alone, one, all_ = (plan_exchange(counts, ExchangeCaps(foreign=f, **caps)) for f in (4, 5, GENEROUS))
    assert (alone.load, alone.moves) == ([1200, 0, 0, 0], [])
    assert one.moves == [(0, 1)] and max(one.load) < 620 and one.foreign_peak() == 5
    assert all_.load == [300] * 4 and all_.moves == [(0, 1), (0, 2), (0, 3)]
    assert all_.native == alone.load


def test_lends_only_above_the_imbalance_and_in_ranges_of_enough_rows():
    counts = np.array([[60, 0, 40, 0], [60, 0, 40, 0]])
    lends = {"rows": 200, "foreign": GENEROUS}
    assert plan_exchange(counts, ExchangeCaps(imbalance=1.2, **lends)).load == [100, 100]
    assert plan_exchange(counts, ExchangeCaps(imbalance=1.21, **lends)).load == [120, 80]
    assert plan_exchange(counts, ExchangeCaps(imbalance=1.2, min_rows=20, **lends)).load == [100, 100]
    assert plan_exchange(counts, ExchangeCaps(imbalance=1.2, min_rows=21, **lends)).load == [120, 80]
    counts = np.array([[40, 20, 20, 20]] * 4)  # an excess of 60, and room for 20 at each of three
    assert plan_exchange(counts, ExchangeCaps(min_rows=20, **lends)).load == [100] * 4
    assert plan_exchange(counts, ExchangeCaps(min_rows=21, **lends)).load == [160, 80, 80, 80]


def test_very_large_counts_are_exact():
    rng = np.random.default_rng(0)
    counts = rng.integers(2**39, 2**40, (3, 6), endpoint=True)
    counts[0, 0], counts[1, 3], counts[2, 5] = 2**40, 1, 0
    plan = plan_exchange(counts, ExchangeCaps(rows=2**40, foreign=GENEROUS, imbalance=1))
    sends = np.array([[plan.send_splits(r, w) for r in range(3)] for w in range(plan.num_waves)])
    assert sends.sum((0, 2)).tolist() == counts.sum(1).tolist()
    assert max(sends.sum(1).max(), sends.sum(2).max()) <= 2**40 and plan.num_waves <= plan.lower_bound + 1
    for source, expert in np.argwhere(counts):
        at = 0
        for e, start, stop in sorted(r for w in range(plan.num_waves) for r in plan.sends(source, w)):
            if e == expert:
                assert start == at
                at = stop
        assert at == counts[source, expert]


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 60)), min_size=1, max_size=9))
def test_prefixes_are_of_one_total_order(counts):
    counts = np.array([counts])
    total, sources = int(counts.sum()), counts.shape[1]
    taken = prefixes(np.repeat(counts, total + 1, 0), np.arange(total + 1))
    assert (taken.sum(1) == np.arange(total + 1)).all() and (taken[-1] == counts[0]).all()
    assert np.diff(taken, axis=0).min(initial=0) >= 0
    share = counts / max(total, 1)
    cells = max(total // (sources + 2), 1)
    assert (np.abs(taken - share * np.arange(total + 1)[:, None]) <= counts / cells + 1).all()


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_repair_reaches_the_lower_bound(ranks, waves, limit, seed):
    # The hardest queues there are: sums of `waves` matrices whose rows and columns all have `limit` rows, all of them
    # given to one wave at first.
    rng = np.random.default_rng(seed)
    lengths = np.zeros((ranks, ranks), dtype=np.int64)
    for _ in range(waves * limit):
        lengths[np.arange(ranks), rng.permutation(ranks)] += 1
    pace = np.zeros((waves + 1, ranks, ranks), dtype=np.int64)
    pace[rng.integers(1, waves + 1) :] = lengths
    repaired = repair(pace, limit)
    assert most(repaired) == limit and np.diff(repaired, axis=0).min() >= 0
    assert (repaired[0] == 0).all() and (repaired[-1] == lengths).all()


@pytest.mark.parametrize(
    ("counts", "caps", "message"),
    [
        ([[1, 2], [3, 4], [5, 6]], {"rows": 8}, "2 experts cannot be shared by 3 ranks; give a multiple of 3"),
        ([[1, 2], [3, -4]], {"rows": 8}, r"counts must lie between 0 and 2\*\*40, got -4 to 3"),
        ([[1, 2], [3, 2**41]], {"rows": 8}, r"counts must lie between 0 and 2\*\*40"),
        ([1, 2], {"rows": 8}, r"counts must be integers \[ranks, experts\], got shape \(2,\)"),
        ([[1.0, 2.0]], {"rows": 8}, "counts must be integers .* dtype float64"),
        ([[1, 2], [3, 4]], {"rows": 1}, "ExchangeCaps.rows=1 must be at least the number of ranks, 2"),
        ([[1, 2]], {"rows": 0}, "ExchangeCaps.rows=0 must be an integer, at least 1"),
        ([[1, 2]], {"rows": 8.0}, "ExchangeCaps.rows=8.0 must be an integer"),
        ([[1, 2]], {"rows": 8, "foreign": -1}, "ExchangeCaps.foreign=-1 must be an integer, at least 0"),
        ([[1, 2]], {"rows": 8, "imbalance": 0.9}, "ExchangeCaps.imbalance=0.9 must be at least 1"),
        ([[1, 2]], {"rows": 8, "imbalance": float("nan")}, "ExchangeCaps.imbalance=nan must be at least 1"),
    ],
)
def test_bad_input_is_named(counts, caps, message):
    with pytest.raises(ValueError, match=message):
        plan_exchange(counts, ExchangeCaps(**caps))


def test_a_wave_that_is_not_there():
    plan = plan_exchange([[1, 2]], ExchangeCaps(rows=8))
    for ask in (plan.sends, plan.receives, plan.send_splits, plan.receive_splits):
        with pytest.raises(IndexError, match="wave=1: the plan has waves 0 to 0"):
            ask(0, 1)


def test_the_digest_tells_waves_and_caps_apart():
    counts = np.full((2, 4), 10)
    digests = {plan_exchange(counts, ExchangeCaps(rows=r)).digest() for r in (20, 21, 80, 81)}
    moved = counts.copy()
    moved[0, :2] = 9, 11
    assert len(digests | {plan_exchange(moved, ExchangeCaps(rows=20)).digest()}) == 5
