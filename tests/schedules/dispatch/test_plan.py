import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longmoe.schedules.dispatch.plan import MIN_ROWS, plan_waves, rows

COUNTS = st.lists(st.one_of(st.just(0), st.integers(1, 5), st.integers(1, 500)), min_size=1, max_size=40)


@settings(max_examples=500, deadline=None)
@given(counts=COUNTS, limit=st.integers(1, 100), max_experts=st.one_of(st.none(), st.integers(1, 5)))
def test_waves_cover_every_row_once_within_the_limit(counts, limit, max_experts):
    waves = plan_waves(counts, limit, max_experts)
    segments = [segment for wave in waves for segment in wave.segments]
    first = [sum(counts[:e]) for e in range(len(counts))]

    at = 0
    for segment in segments:
        assert segment.start == at and segment.stop > at
        assert (
            first[segment.expert] <= segment.start and segment.stop <= first[segment.expert] + counts[segment.expert]
        )
        at = segment.stop
    assert at == sum(counts)

    for wave in waves:
        assert wave.stop - wave.start <= limit
        assert max_experts is None or len(wave.experts) <= max_experts
    for expert, count in enumerate(counts):
        mine = [segment for segment in segments if segment.expert == expert]
        assert len(mine) == -(-count // limit)  # split only where it must be, into the fewest parts
        assert [segment.first for segment in mine] == [True] * bool(count) + [False] * (len(mine) - 1)
        assert [segment.last for segment in mine] == [False] * (len(mine) - 1) + [True] * bool(count)


def test_no_rows_no_waves():
    assert plan_waves([0, 0, 0], 4) == []


def test_an_expert_that_fits_one_wave_is_not_split():
    assert [[(s.expert, s.start, s.stop) for s in w.segments] for w in plan_waves([3, 3, 2, 9], 5)] == [
        [(0, 0, 3)],
        [(1, 3, 6), (2, 6, 8)],
        [(3, 8, 12)],
        [(3, 12, 17)],
    ]


def test_rows_of_a_budget():
    assert rows(1000, 100) == 10
    with pytest.raises(ValueError, match=rf"dispatch.budget=399 .* at least {MIN_ROWS * 100}\."):
        rows(399, 100)
