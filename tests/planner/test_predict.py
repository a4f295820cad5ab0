"""What becomes of a moment's bytes: divided, gathered, exchanged, capped, offloaded; and the highest moment."""

import dataclasses

import pytest

from hf_longmoe import BoundariesConfig, DispatchConfig, LongMoEConfig, OptimizerConfig, VocabConfig
from hf_longmoe.peaks.ledger import OWN, Moment
from hf_longmoe.peaks.region import PHASES
from hf_longmoe.planner.caps import NOTHING
from hf_longmoe.planner.changes import Together, host_bytes, scheduled, step_moment, unbounded
from hf_longmoe.planner.closed_forms import Resident
from hf_longmoe.planner.predict import STEP, predict

# 8 ranks, bfloat16: 1000 elements of a model of 8000. A layer of 400 bytes, a head of 600.
RESIDENT = Resident(
    elements=1000,
    parameters=2000,
    gradients=2000,
    moments=4000,
    counted=8000,
    gathered_layer=400,
    gathered_head=600,
)
TOGETHER = Together(resident=RESIDENT, itemsize=2, exchange=70, tied=False)
TIED = dataclasses.replace(TOGETHER, tied=True)
BACKWARD, FORWARD, AT_HEAD = ("backward", "layer"), ("forward", "layer"), ("backward", "vocab")
ALL = LongMoEConfig(optimizer=OptimizerConfig(bucket=160, slots=2))


def only(**parts):
    return dataclasses.replace(NOTHING, **parts)


def change_of(caps, together=TOGETHER, extra=None, *, own=None, boundary=100, count=10, ring=False):
    """own: of `dispatch` where its schedule runs, by moment; all that is asked of, if not given."""
    extra = {"dispatch": {}, "vocab": {}} if extra is None else extra
    asked = [(phase, at_work) for phase in PHASES for at_work in ("dispatch", "vocab", "layer", "optimizer", "other")]
    moments = {key: Moment({}, {OWN: {"dispatch": level}} if (level := (own or {}).get(key)) else {}) for key in asked}
    return scheduled(together, caps, extra, moments, boundary=boundary, count=count, ring=ring)


# -- caps ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("level", "more", "found"),
    [
        (700, 50, 750),  # where the schedule runs
        (600, 50, 650),  # another of its moments
        (1000, 50, 1000),  # what it found when it began
        (1000, 500, 1200),  # less than it takes now
        (1000, -500, 1000),
        (700, -500, 200),
    ],
)
def test_caps_change_what_a_schedule_takes_and_not_what_it_found(level, more, found):
    key = ("recompute", "dispatch")
    change = change_of(ALL, extra={"dispatch": {"recompute": more}, "vocab": {}}, own={key: 700})
    assert change(key, "dispatch", level) == found


# -- a rank's company ------------------------------------------------------------------------------------------------
def test_what_is_kept_is_divided():
    change = unbounded(TOGETHER)
    for key in (("resident", "other"), ("update", "optimizer")):
        assert change(key, "parameters", 16_000) == 2000 and change(key, "gradients", 8000) == 1000
        assert change(key, "optimizer", 32_000) == 4000


def test_kept_in_float32_it_is_twice_as_much():
    own = dataclasses.replace(RESIDENT, parameters=4000, gradients=4000, moments=8000)
    change = unbounded(dataclasses.replace(TOGETHER, resident=own))
    key = ("resident", "other")
    assert change(key, "parameters", 16_000) == 4000 and change(key, "optimizer", 32_000) == 8000


@pytest.mark.parametrize(
    ("key", "parameters", "gradients"),
    [
        (FORWARD, 800, 0),  # the layer at work and the next
        (("recompute", "layer"), 800, 800),
        (BACKWARD, 800, 800),  # one whole gradient, twice
        (("forward", "vocab"), 600, 0),
        (AT_HEAD, 600, 1200),
        (("resident", "other"), 0, 0),
    ],
)
def test_what_is_gathered(key, parameters, gradients):
    change = unbounded(TOGETHER)
    assert change(key, "parameters", 0) == parameters and change(key, "gradients", 0) == gradients
    assert change(key, "optimizer", 0) == 0


def test_a_tied_head_is_gathered_all_through():
    change = unbounded(TIED)
    assert change(FORWARD, "parameters", 0) == 1400 and change(AT_HEAD, "parameters", 0) == 600
    assert change(BACKWARD, "gradients", 0) == 800


def test_a_ring_keeps_the_head_divided():
    caps = only(vocab=VocabConfig())
    assert change_of(caps, ring=True)(AT_HEAD, "parameters", 0) == 0
    assert change_of(caps, ring=False)(AT_HEAD, "parameters", 0) == 600


def test_buffers_of_the_exchange_while_dispatch_is_at_work():
    for change in (unbounded(TOGETHER), change_of(only(vocab=VocabConfig()))):
        assert change(("forward", "dispatch"), "dispatch", 30) == 100
        assert change(FORWARD, "dispatch", 30) == 30 and change(("forward", "dispatch"), "layer", 30) == 30


# -- the schedules ---------------------------------------------------------------------------------------------------
def test_a_schedule_takes_its_own_beside_the_counted_while_it_is_at_work():
    extra = {"dispatch": {"forward": 50, "backward": -500}, "vocab": {"backward": 9}}
    change = change_of(ALL, extra=extra)
    assert change(("forward", "dispatch"), "dispatch", 100) == 150
    assert change(("recompute", "dispatch"), "dispatch", 100) == 100
    assert change(("backward", "dispatch"), "dispatch", 100) == 0  # never below
    assert change(AT_HEAD, "vocab", 100) == 109 and change(AT_HEAD, "dispatch", 100) == 100


@pytest.mark.parametrize(
    ("host", "depth", "kept"),
    [
        (None, 1, 3),  # one that is used, one on its way, one that arrives
        (None, 2, 4),
        (1000, 1, 3),
        (999, 1, 1 + 3),  # nine on the host, one never leaves
        (650, 1, 4 + 3),
        (250, 1, 10),
        (99, 1, 10),  # the host holds none: nothing moves
    ],
)
def test_boundaries_on_the_device(host, depth, kept):
    caps = only(boundaries=BoundariesConfig(host_budget=host, depth=depth))
    change = change_of(caps)
    assert change(BACKWARD, "boundaries", 1000) == kept * 100
    assert change(FORWARD, "boundaries", 100) == 100  # the first of them
    assert host_bytes(TOGETHER, caps, 100, 10) == {"boundaries": 100 * (10 if host is None else host // 100)}


def test_unscheduled_boundaries_and_optimizer_stay():
    change = change_of(only(vocab=VocabConfig()))
    assert change(BACKWARD, "boundaries", 1000) == 1000 and change(BACKWARD, "optimizer", 32_000) == 4000
    assert change(STEP, "parameters", 16_000) == 2000 and change(STEP, "optimizer", 32_000) == 4000
    assert step_moment(TOGETHER, NOTHING) == {} and host_bytes(TOGETHER, NOTHING, 100, 10) == {}


def test_an_offloaded_optimizer_is_on_the_device_in_its_step_only():
    change = change_of(ALL)
    assert change(BACKWARD, "optimizer", 32_000) == 0 and change(BACKWARD, "parameters", 16_000) == 2800
    ((key, moment),) = step_moment(TOGETHER, ALL).items()
    # Weight and gradient, and two buckets of 160 bytes: 10 elements of 16 bytes each.
    assert key == STEP and moment.highs == {"parameters": 2000, "gradients": 2000, "optimizer": 320}
    assert {name: change(key, name, level) for name, level in moment.highs.items()} == moment.highs


def test_buckets_are_no_larger_than_the_model():
    caps = only(optimizer=OptimizerConfig(bucket="64MiB"))
    assert step_moment(TOGETHER, caps)[STEP].highs["optimizer"] == 16 * 1000


def test_host_bytes_of_the_optimizer():
    """Two float32 moments an element; and a float32 master of what is kept in half precision."""
    caps = only(optimizer=OptimizerConfig())
    assert host_bytes(TOGETHER, caps, 100, 10) == {"optimizer": 12_000}
    wide = dataclasses.replace(RESIDENT, parameters=4000)
    assert host_bytes(dataclasses.replace(TOGETHER, resident=wide), caps, 100, 10) == {"optimizer": 8000}


# -- the peak --------------------------------------------------------------------------------------------------------
def test_the_highest_of_all_moments():
    moments = {
        FORWARD: Moment({"layer": 50, "vocab": 1}, {"layer": {"layer": 50, "vocab": 1}}),
        AT_HEAD: Moment(
            {"layer": 40, "vocab": 60},
            {"vocab": {"layer": 10, "vocab": 60}, "layer": {"layer": 40, "vocab": 20}},
        ),
    }
    found = predict(moments, lambda key, name, level: level, {"boundaries": 5})
    assert (found.total, found.phase, found.at_work, found.largest) == (70, "backward", "vocab", "vocab")
    assert found.components["layer"] == 50 and found.components["vocab"] == 60 and found.components["aux"] == 0
    assert found.at_peak["layer"] == 10 and sum(found.at_peak.values()) == found.total
    assert found.host == {"boundaries": 5}
    # Another moment is the highest once the vocabulary is capped.
    capped = predict(moments, lambda key, name, level: min(level, 5) if name == "vocab" else level)
    assert (capped.total, capped.phase, capped.largest) == (51, "forward", "layer") and capped.host == {}


def test_the_step_of_an_offloaded_optimizer_may_be_the_highest():
    moments = {BACKWARD: Moment({"layer": 1}, {"layer": {"layer": 1}})} | step_moment(TOGETHER, ALL)
    found = predict(moments, change_of(ALL))
    assert (found.total, found.phase, found.at_work) == (4320, "update", "optimizer")
    assert found.components["optimizer"] == 320


def test_dispatch_off_and_vocab_on():
    caps = only(vocab=VocabConfig())
    change = change_of(caps, extra={"dispatch": {"forward": 9}, "vocab": {"forward": 4}})
    assert change(("forward", "dispatch"), "dispatch", 30) == 100
    assert change(("forward", "vocab"), "vocab", 30) == 34
    on = change_of(only(dispatch=DispatchConfig()), extra={"dispatch": {"forward": 9}, "vocab": {}})
    assert on(("forward", "dispatch"), "dispatch", 30) == 39
