"""Which caps are chosen, and the longest sequence by bisection."""

import pytest

from hf_longmoe import LongMoEConfig
from hf_longmoe.planner.caps import NOTHING, candidates, choose, longest

MIB = 2**20


def total_of(sizes):
    """`total(caps)`: of each part by its cap, or by its size where it is off."""

    def total(caps):
        asked.append(caps)
        parts = [part.budget if part else sizes[name] for name, part in (("d", caps.dispatch), ("v", caps.vocab))]
        parts.append(0 if caps.boundaries else sizes["b"])
        parts.append(caps.optimizer.bucket * caps.optimizer.slots if caps.optimizer else sizes["o"])
        return sum(parts)

    asked: list[LongMoEConfig] = []
    total.asked = asked
    return total


SIZES = {"d": 4000 * MIB, "v": 6000 * MIB, "b": 1000 * MIB, "o": 2000 * MIB}


def test_nothing_is_capped_where_it_fits():
    total = total_of(SIZES)
    assert choose(total, 13_000 * MIB) == (NOTHING, 13_000 * MIB)
    assert total.asked == [NOTHING]  # and no other is worth a count


@pytest.mark.parametrize(
    ("limit", "budget", "boundaries", "bucket"),
    [
        (12_999, 256, False, None),  # the largest caps, and no offloading
        (3512, 256, False, None),
        (3511, 128, False, None),
        (3008, 4, False, None),
        (3007, 256, True, None),  # boundaries before the optimizer
        (2007, 256, False, 64),
        (1007, 256, True, 64),
        (639, 256, True, 16),  # smaller buckets before smaller budgets
        (543, 128, True, 64),
        (40, 4, True, 16),
    ],
)
def test_the_larger_caps_and_the_fewer_schedules_first(limit, budget, boundaries, bucket):
    caps, found = choose(total_of(SIZES), limit * MIB)
    assert caps.dispatch.budget == caps.vocab.budget == budget * MIB and found <= limit * MIB
    assert (caps.boundaries is not None) == boundaries
    assert (caps.optimizer and caps.optimizer.bucket) == (bucket and bucket * MIB)


def test_the_least_where_nothing_fits():
    caps, found = choose(total_of(SIZES), 39 * MIB)
    assert found == (4 + 4 + 2 * 16) * MIB and caps.dispatch.budget == caps.vocab.budget == 4 * MIB
    assert caps.boundaries is not None and caps.optimizer.bucket == 16 * MIB
    # What is small as it is takes more with caps.
    assert choose(total_of(dict.fromkeys(SIZES, MIB)), MIB) == (NOTHING, 4 * MIB)


def test_caps_that_are_too_small_for_the_model_are_passed_over():
    whole = total_of(SIZES)

    def total(caps):
        return None if caps.dispatch is not None and caps.dispatch.budget < 64 * MIB else whole(caps)

    caps, found = choose(total, 100 * MIB)
    assert caps.dispatch.budget == 64 * MIB and found == (64 + 64 + 32) * MIB
    assert choose(total, 160 * MIB)[0].dispatch.budget == 64 * MIB


def test_every_candidate_is_another():
    found = list(candidates())
    assert found[0] == NOTHING and len(found) == len({repr(caps) for caps in found})


@pytest.mark.parametrize("unit", [1, 7, 1024])
@pytest.mark.parametrize("limit", [0, 9, 100_000, 123_456_789])
def test_the_longest_by_bisection(limit, unit):
    def total(tokens):
        asked.append(tokens)
        return 10 + 3 * tokens

    asked = []
    found = longest(total, limit, unit)
    if found is None:
        assert total(unit) > limit
    else:
        assert found % unit == 0 and total(found) <= limit < total(found + unit)
    assert len(asked) < 35


def test_the_longest_has_an_end():
    assert longest(lambda tokens: 0, 1, 1000, most=10_500) == 10_000
    assert longest(lambda tokens: 0, 1, 1000, most=500) == 1000
    assert longest(lambda tokens: tokens, 2**40, 1024) == 2**27
