"""What a rehearsal skips, and that nothing is skipped outside of one."""

from hf_longmoe.schedules.dispatch.plan import plan_waves, shown_waves
from hf_longmoe.schedules.rehearsal import Rehearsal, each, rehearsal, rehearsing


def shown(items, **given):
    with rehearsal(Rehearsal(**given)):
        return list(each(range(len(items)), kind=items.__getitem__))


def test_repetitions_are_skipped_and_new_pairs_are_not():
    assert shown("aaaaab") == [0, 1, 4, 5]  # the last a again: b follows an a
    assert shown("abababab") == [0, 1, 2]
    assert shown("aabbaabb") == [0, 1, 2, 3, 4]
    assert shown("") == [] and shown("a") == [0]
    assert shown("aaaa", skips=False) == [0, 1, 2, 3]


def test_outside_of_a_rehearsal_all_are_run():
    assert rehearsing() is None
    assert list(each("aaaa", kind=str)) == list("aaaa")


def test_an_expert_in_several_waves_has_its_first_and_its_last_or_none():
    waves = plan_waves([100] * 6, 30)
    with rehearsal(Rehearsal()):
        some = shown_waves(waves)
    assert len(some) < len(waves)
    segments = [segment for wave in some for segment in wave.segments]
    first = [segment.expert for segment in segments if segment.first]
    assert first == [segment.expert for segment in segments if segment.last] and len(first) > 1
