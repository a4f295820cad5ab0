"""The allocator probe on a scripted allocator, and on one that counts CPU storages."""

import pytest
import torch

from hf_longmoe.peaks import component
from hf_longmoe.peaks.allocator import AllocatorProbe
from hf_longmoe.peaks.region import made, tag


class Memory:
    """An allocator that does as it is told, in bytes."""

    def __init__(self, level=0):
        self.level = self.top = level

    def read(self):
        return self.level, self.top

    def reset_peak(self):
        self.top = self.level

    def take(self, nbytes, and_more_for_a_moment=0):
        self.level += nbytes
        self.top = max(self.top, self.level + and_more_for_a_moment)


def report_of(probe):
    report = probe.report()
    assert sum(part.at_peak for part in report.components.values()) == report.total
    assert all(part.at_peak <= part.peak for part in report.components.values())
    return report


def test_nested_regions_fold_into_their_parents_and_the_total():
    memory = Memory(1000)
    with AllocatorProbe(memory, "cpu") as probe:
        memory.take(10)
        with component("layer"):
            memory.take(100)
            with component("dispatch"):
                memory.take(50, and_more_for_a_moment=7000)
            memory.take(-60, and_more_for_a_moment=100)
        memory.take(5)
    report = report_of(probe)
    assert report.total == 1000 + 10 + 100 + 50 + 7000
    parts = report.components
    assert {name: part.at_peak for name, part in parts.items() if part.at_peak} == {
        "other": 1010,
        "layer": 100,
        "dispatch": 7050,
    }
    assert parts["dispatch"].peak == 7050 and parts["dispatch"].working == 7000
    assert parts["layer"].peak == 100 - 60 + 100
    assert report.phases == {"resident": 1010, "forward": 8160}


def test_a_higher_peak_later_in_the_step_is_the_one_reported():
    memory = Memory()
    with AllocatorProbe(memory, "cpu") as probe:
        for nbytes in (30, 80, 50):
            with component("vocab"):
                memory.take(nbytes)
            memory.take(-nbytes)
    report = report_of(probe)
    assert report.total == report.components["vocab"].at_peak == 80


def test_tagged_tensors_are_moved_and_taken_off_when_they_die():
    state, boundary = torch.zeros(25), torch.zeros(50)
    memory = Memory(100)
    with AllocatorProbe(memory, "cpu") as probe:
        tag("optimizer", state)
        with component("layer"):
            memory.take(200)
            tag("boundaries", boundary)
            memory.take(30)
        with component("dispatch"):
            memory.take(-200)
            del boundary
        memory.take(1000)
    report = report_of(probe)
    at_peak = {name: part.at_peak for name, part in report.components.items() if part.at_peak}
    assert at_peak == {"optimizer": 100, "layer": 30, "other": 1000} and report.total == 1130
    assert report.components["boundaries"].peak == 200 and report.components["dispatch"].peak == 0
    assert report.components["layer"].peak == 30


def test_a_tagged_storage_that_is_resized_stays_with_its_component():
    weight = torch.zeros(100)
    memory = Memory(400)
    with AllocatorProbe(memory, "cpu") as probe:
        tag("parameters", weight)
        weight.untyped_storage().resize_(0)
        memory.take(-400)
        with component("layer"):
            memory.take(800)
            weight.untyped_storage().resize_(800)
    report = report_of(probe)
    assert report.components["parameters"].peak == 800 and report.components["layer"].peak == 0
    assert "resize_" not in vars(torch.UntypedStorage)


def test_backward_belongs_to_the_component_that_hooks_announce():
    memory = Memory()
    x = torch.ones(3, requires_grad=True)

    def takes(nbytes):
        def hook(gradient):
            memory.take(nbytes, and_more_for_a_moment=7)

        return hook

    with AllocatorProbe(memory, "cpu") as probe:
        a = x * 2
        a.register_hook(takes(100))
        with component("dispatch"):
            b = a * 3
            b.register_hook(takes(10))
        made("dispatch", b)
        made("layer", [a])
        with component("vocab"):
            loss = b.sum()
        made("vocab", loss)
        loss.backward()
    parts = report_of(probe).components
    # A tensor's own hooks run before the node that made it: 10 is taken while the loss's backward is at work.
    assert parts["vocab"].peak == loss.nbytes + 10 + 7
    assert parts["dispatch"].peak == b.nbytes + 100 + 7
    assert parts["layer"].peak == a.nbytes
    assert parts["dispatch"].phases == {"resident": 0, "forward": 12, "backward": 119}


def test_what_other_components_freed_makes_no_negative_bytes():
    memory = Memory(1000)
    with AllocatorProbe(memory, "cpu") as probe:
        with component("vocab"):
            memory.take(-900)
        with component("dispatch"):
            memory.take(2000)
    report = report_of(probe)
    assert report.total == 2100
    assert all(part.at_peak >= 0 and part.peak >= 0 and part.working >= 0 for part in report.components.values())


def test_it_opens_once_and_starts_afresh():
    memory = Memory(10)
    probe = AllocatorProbe(memory, "cpu")
    with probe:
        memory.take(100)
        with pytest.raises(RuntimeError, match="open already"):
            probe.__enter__()
    assert probe.report().total == 110
    memory.take(-100)
    with probe:
        pass
    assert probe.report().total == 10
