import threading

import pytest
import torch

from hf_longmoe.peaks import StorageProbe, component
from hf_longmoe.peaks.region import COMPONENTS, innermost, pop, push


def current():
    region = innermost()
    return None if region is None else region.component


def test_without_a_probe_a_region_is_nothing():
    assert push("dispatch") is None and current() is None
    with component("no such component"):
        assert current() is None
    pop(None)


def test_an_unknown_component_is_an_error_that_suggests_the_nearest():
    with StorageProbe(), pytest.raises(ValueError, match="component='dispach' is unknown.*Did you mean 'dispatch'"):
        push("dispach")
    assert current() is None


def test_the_innermost_region_counts_and_an_exception_leaves_it():
    with StorageProbe() as probe:
        with component("dispatch"):
            with pytest.raises(RuntimeError), component("vocab"):
                kept = [torch.zeros(10)]
                raise RuntimeError
            kept.append(torch.zeros(100))
        kept.append(torch.zeros(1000))
    peaks = {name: part.peak for name, part in probe.report().components.items() if part.peak}
    assert peaks == {"vocab": 40, "dispatch": 400, "other": 4000}


def test_leaving_a_region_leaves_what_was_entered_inside_it_too():
    with StorageProbe():
        outer = push("dispatch")
        inner = push("vocab")
        pop(outer)
        assert current() is None
        pop(inner)  # already left
        again = push("aux")
        pop(inner)
        assert current() == "aux"
        pop(again)


def test_regions_are_per_thread_and_reach_every_open_probe():
    with StorageProbe() as outer, component("layer"), StorageProbe() as inner:
        seen = []
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        assert seen == [None] and current() == "layer"
        kept = torch.zeros(8)
    assert inner.report().components["layer"].peak == kept.nbytes
    assert outer.report().components["layer"].peak == kept.nbytes
    assert set(outer.report().components) == set(COMPONENTS)
