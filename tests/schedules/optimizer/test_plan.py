"""Buckets, blocks, order, and the choice between the two ways: integers and arithmetic only."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longmoe.schedules.optimizer.arena import lay_out
from hf_longmoe.schedules.optimizer.choose import best_share, step_seconds
from hf_longmoe.schedules.optimizer.plan import capacity, cut, interleave, split
from hf_longmoe.schedules.optimizer.record import Timings


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=12), st.integers(1, 6), st.integers(1, 4))
def test_every_element_once_in_buckets_within_the_cap_cut_at_multiples_of_64(sizes, most, block):
    params = [(torch.zeros(size), str(size)) for size in sizes]
    entries, arenas = lay_out(params, lambda device: True, 0)
    assert len(arenas) == 1 and arenas[0].numel >= sum(sizes)
    buckets = cut(entries, 64 * most)
    for bucket in buckets:
        assert 0 < bucket.numel <= 64 * most
        assert sum(run.numel for run in bucket.runs()) == bucket.numel
        assert len(bucket.runs()) == 1  # all have gradients: nothing is left out
        for blocks in (bucket, *split(bucket, 64 * block)):
            assert blocks is bucket or blocks.numel <= 64 * block
            assert all(piece.start % 64 == 0 and piece.at % 64 == 0 for piece in blocks.pieces)
        whole = [element for piece in bucket.pieces for element in range(piece.at, piece.at + piece.numel)]
        parts = [
            element
            for blocks in split(bucket, 64 * block)
            for piece in blocks.pieces
            for element in range(piece.at, piece.at + piece.numel)
        ]
        assert whole == parts
    seen = [
        (piece.entry, element) for b in buckets for piece in b.pieces for element in range(piece.start, piece.stop)
    ]
    assert seen == [(entry, element) for entry in entries for element in range(entry.numel)]
    assert len(buckets) <= arenas[0].numel // (64 * most) + 1  # full, but the last
    some = cut(entries[::2], 64 * most)
    assert sum(run.numel for bucket in some for run in bucket.runs()) == sum(bucket.numel for bucket in some)


@pytest.mark.parametrize("share", (0.0, 0.2, 0.5, 0.9, 1.0))
def test_the_first_buckets_are_the_accelerators_and_both_kinds_alternate(share):
    entries, _ = lay_out([(torch.zeros(6400), "")], lambda device: True, 0)
    buckets = cut(entries, 64)
    order = list(interleave(buckets, share))
    device = [bucket for bucket, there in order if there]
    assert device == buckets[: round(100 * share)]
    assert [bucket for bucket, there in order if not there] == buckets[round(100 * share) :]
    if 0 < share < 1:
        assert not order[0][1]
        for number in range(0, 100, 20):
            assert abs(sum(there for _, there in order[: number + 20]) - share * (number + 20)) <= 2


def test_capacity():
    assert capacity(2**26, 16) == 2**22 - 64
    with pytest.raises(ValueError, match="give at least 1280 bytes"):
        capacity(1279, 16)
    assert capacity(1280, 16) == 64


def timings(elements, where, **seconds):
    full = dict(down=0.0, accelerator=0.0, host=0.0, up=0.0) | seconds
    return Timings(full, {}, {"accelerator": 0, "host": 0, where: elements}, 0.0)


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        (dict(down=12, up=12), dict(down=2, up=2, host=40), (0.7, 0.9)),
        (dict(down=12, up=12), dict(down=2, up=2, host=12), (0.4, 0.6)),
        (dict(down=12, up=12), dict(down=2, up=2, host=300), (1.0, 1.0)),
        (dict(down=120, up=120), dict(down=2, up=2, host=4), (0.0, 0.0)),
        (dict(down=8, up=8), dict(down=8, up=4, host=2), (0.0, 1.0)),  # the link is the limit: one way only
    ],
)
def test_the_share_that_the_timings_speak_for(device, host, expected):
    device, host = timings(10, "accelerator", **device), timings(10, "host", **host)
    share = best_share(device, host, 8, both=False)
    assert expected[0] <= share <= expected[1]
    assert 0 < best_share(device, host, 8, both=True) < 1
    if share in (0.0, 1.0):
        assert step_seconds(share, device, host, 8) <= 1.12 * step_seconds(0.5, device, host, 8)
