"""Depths with a pattern kept, and the line through two of them."""

import pytest

from hf_longmoe.peaks.ledger import TOTAL, Moment
from hf_longmoe.peaks.region import COMPONENTS
from hf_longmoe.peaks.report import ComponentPeak, PeakReport
from hf_longmoe.planner import extrapolate, periods
from hf_longmoe.planner.depth import depths, within


@pytest.mark.parametrize(
    ("kinds", "found", "ran"),
    [
        ("s" * 32, (0, 1), (1, 2)),
        ("ddd" + "s" * 58, (3, 1), (4, 5)),
        ("wf" * 18, (0, 2), (2, 4)),
        ("wf" * 4 + "w", (0, 2), (3, 5)),  # the last period is incomplete, here as there
        ("d" + "llf" * 5, (1, 3), (4, 7)),
        ("ds", (1, 1), (2,)),
        ("s", (0, 1), (1,)),
    ],
)
def test_depths_keep_the_pattern(kinds, found, ran):
    assert periods(kinds) == found and depths(kinds) == ran
    if len(ran) == 2:
        assert (len(kinds) - ran[0]) % (ran[1] - ran[0]) == 0


def report(levels):
    """levels: (phase, component at work) -> bytes of `gradients` and `vocab` at its moment."""
    moments = {key: dict.fromkeys(COMPONENTS, 0) | values for key, values in levels.items()}
    both = {key: Moment(values, {name: values for name in values}) for key, values in moments.items()}
    highs = {name: {} for name in COMPONENTS}
    for (phase, _), values in moments.items():
        for name, level in values.items():
            highs[name][phase] = max(highs[name].get(phase, 0), level)
    top = max(moments.values(), key=lambda values: sum(values.values()))
    components = {
        name: ComponentPeak(peak=max(highs[name].values()), at_peak=top[name], working=7, phases=highs[name])
        for name in COMPONENTS
    }
    return PeakReport(total=sum(top.values()), components=components, phases={}, probe="storage"), both


def test_a_total_that_peaks_at_another_moment_at_the_real_depth():
    def at(depth):
        return report(
            {
                ("backward", "vocab"): {"vocab": 100, "gradients": 10},
                ("backward", "layer"): {"gradients": 20 * depth},
                ("forward", "layer"): {"gradients": 0, "vocab": 5},
            }
        )

    (small, first), (large, second) = at(1), at(2)
    assert small.total == large.total == 110
    got = extrapolate((1, 2), (small, large), (first, second), 10)
    assert got.total == 200 and got.components["gradients"].at_peak == 200 and got.components["vocab"].at_peak == 0
    assert got.components["vocab"].peak == 100 and got.phases == {"backward": 200, "forward": 5}
    assert got.components["vocab"].working == 7
    # A third run would show nothing else.
    assert got.components == at(10)[0].components


def test_the_moment_of_the_highest_total_where_no_component_is_highest():
    def at(depth):
        """The one time `vocab` is highest, another `gradients`, and between them both are nearly so."""
        found, moments = report({("backward", "vocab"): {"vocab": 100, "gradients": 20 * depth}})
        (moment,) = moments.values()
        moment.levels.clear()
        zero = dict.fromkeys(COMPONENTS, 0)
        moment.levels["vocab, last"] = zero | {"vocab": 100}
        moment.levels["gradients, last"] = zero | {"gradients": 20 * depth}
        moment.levels[TOTAL] = zero | {"vocab": 90, "gradients": 18 * depth}
        return found, moments

    (small, first), (large, second) = at(1), at(2)
    assert extrapolate((1, 2), (small, large), (first, second), 10).total == 90 + 180


@pytest.mark.parametrize(
    ("levels", "total", "other"),
    [
        ({"vocab": 40, "layer": 60}, {"vocab": 40, "layer": 60}, {"vocab": 40, "layer": 60}),
        ({"vocab": 101, "layer": 60}, {"vocab": 100, "layer": 60}, {"vocab": 100, "layer": 60}),
        ({"vocab": 140, "layer": 60}, None, {"vocab": 100, "layer": 60}),
        ({"vocab": 40, "layer": -50}, None, {"vocab": 40, "layer": 0}),
    ],
)
def test_a_total_of_two_moments_is_left_out(levels, total, other):
    tops = {"vocab": 100, "layer": 100}
    assert within(TOTAL, levels, tops) == total
    assert within("vocab, last", levels, tops) == other


def test_a_depth_between_periods_is_refused():
    one, moments = report({("forward", "layer"): {"vocab": 1}})
    with pytest.raises(ValueError, match="depth=5 is no whole number of periods of 2 layers from 2"):
        extrapolate((2, 4), (one, one), (moments, moments), 5)
