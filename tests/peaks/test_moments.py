"""What was alive when a component was highest: the first time, the last, with most of `layer`, and all together."""

import torch

from hf_longmoe.peaks import StorageProbe, component
from hf_longmoe.peaks.ledger import OWN, TOTAL
from hf_longmoe.peaks.region import tag

KEY = ("forward", "dispatch")


def rows(name, count):
    with component(name):
        return torch.zeros(count, dtype=torch.uint8)


def test_of_the_times_at_which_a_component_is_highest():
    with StorageProbe() as probe:
        kept = [rows("layer", 10)]
        for layer in (0, 500, 300, 0):
            more = rows("layer", layer)
            rows("dispatch", 1000)
            del more
            kept.append(rows("layer", 1))
    moment = probe.moments()[KEY]
    assert moment.highs["dispatch"] == 1000 and moment.highs["layer"] == 511
    held = {name: levels["layer"] for name, levels in moment.levels.items() if levels["dispatch"] == 1000}
    assert held["dispatch, first"] == 10 and held["dispatch, last"] == 13
    assert held["dispatch with layer, first"] == held["dispatch with layer, last"] == held[TOTAL] == 511


def test_all_together_are_highest_where_none_is():
    with StorageProbe() as probe:
        for layer, dispatch in ((500, 100), (450, 450), (100, 500)):
            more = rows("layer", layer)
            rows("dispatch", dispatch)
            del more
    moment = probe.moments()[KEY]
    assert {name: moment.levels[TOTAL][name] for name in ("layer", "dispatch")} == {"layer": 450, "dispatch": 450}
    highest = max(sum(levels.values()) for name, levels in moment.levels.items() if name != TOTAL)
    assert highest == 600 < sum(moment.levels[TOTAL].values()) == 900


def test_where_a_visit_rises_and_not_where_it_begins():
    with StorageProbe() as probe:
        for found, taken in ((5000, 1000), (400, 1200), (300, 10)):
            before = rows("layer", found)
            tag("dispatch", before)
            with component("dispatch"):
                torch.zeros(1, dtype=torch.uint8)
                del before
                here = torch.zeros(taken, dtype=torch.uint8)
                more = torch.zeros(200, dtype=torch.uint8)
                del here, more
    moment = probe.moments()[KEY]
    assert moment.highs["dispatch"] == 5001
    assert moment.levels[OWN]["dispatch"] == 1400  # of those that take as much as any, or half


def test_a_visit_of_several_phases_rises_from_where_it_began():
    x = torch.zeros(100, requires_grad=True)

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                big = torch.zeros(3000, dtype=torch.uint8)
            small = torch.zeros(50, dtype=torch.uint8)
            del big, small
            return gradient.clone()

    with StorageProbe() as probe:
        with component("dispatch"):
            y = Twice.apply(x)
        y.backward(torch.ones(100))
    moments = probe.moments()
    assert moments["recompute", "dispatch"].levels[OWN]["dispatch"] == 400 + 3000
    assert moments["backward", "dispatch"].levels[OWN]["dispatch"] == 400 + 3050
