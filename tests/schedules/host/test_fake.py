"""The fake device is late where a device may be, and does not forgive what a device would not report."""

import pytest
import torch

from hf_longmoe.schedules.host import FakeEngine


def test_a_copy_is_late_and_what_it_writes_is_poison_until_then():
    engine = FakeEngine(eager=0)
    source, host, back = torch.arange(4.0), torch.zeros(4), engine.empty(4, torch.float32)
    assert back.isnan().all()
    down = engine.down(host, source)
    assert host.isnan().all() and not engine.done(down) and engine.waiting() == 1
    back.fill_(5)
    up = engine.up(back, host, after=[down])
    engine.compute_waits(up)  # and what it comes after
    assert torch.equal(back, source) and engine.done(down) and engine.waiting() == 0
    assert engine.sent == {"down": 16, "up": 16}


def test_delays_are_drawn_from_the_seed():
    def ended(seed):
        engine = FakeEngine(seed)
        host, source = torch.zeros(30, 1), torch.ones(30, 1)
        jobs = [engine.down(h, s) for h, s in zip(host, source, strict=True)]
        return [job.done for job in jobs]

    assert ended(1) == ended(1) and len({tuple(ended(seed)) for seed in range(10)}) > 3
    assert any(ended(1)) and not all(ended(1))


def test_streams_keep_their_order():
    for seed in range(10):
        engine = FakeEngine(seed)
        host, sources = torch.zeros(4), [torch.full((4,), float(at)) for at in range(5)]
        jobs = [engine.down(host, source) for source in sources]
        engine.finish(jobs[3])
        assert all(job.done for job in jobs[:4])
        engine.finish(jobs[4])
        assert torch.equal(host, sources[4])


@pytest.mark.parametrize("what", ["source", "destination", "host"])
def test_memory_that_is_freed_too_early(what):
    engine = FakeEngine(eager=0)
    memory = {"source": torch.ones(4), "host": engine.host_empty(16), "destination": torch.ones(4)}
    host = memory["host"].view(torch.float32)
    if what == "destination":
        job = engine.up(memory["destination"], host)
    else:
        job = engine.down(host, memory["source"])
    if what == "host":
        engine.host_free(memory["host"])
    del host, memory[what]
    with pytest.raises(AssertionError, match="was freed before its copy had ended"):
        engine.finish(job)


def test_a_source_that_is_changed_too_early_shows():
    engine = FakeEngine(eager=0)
    host, source = torch.zeros(4), torch.ones(4)
    job = engine.down(host, source)
    source.zero_()
    engine.finish(job)
    assert not host.any()


def test_bytes_of_the_device():
    engine = FakeEngine()
    a, b = engine.empty(10, torch.float32), engine.empty(3, torch.bfloat16)
    assert engine.device_bytes == 46
    view = a.view(2, 5)[1]
    del a
    assert engine.device_bytes == 46  # its memory lives in a view
    del view, b
    assert engine.device_bytes == 0 and engine.peak_device_bytes == 46


def test_bytes_of_the_host():
    engine = FakeEngine()
    a, b = engine.host_empty(10), engine.host_empty(5)
    engine.host_free(a)
    with pytest.raises(AssertionError, match="freed twice"):
        engine.host_free(a)
    assert engine.host_bytes == 5 and engine.peak_host_bytes == 15
    engine.host_limit = 10
    with pytest.raises(MemoryError):
        engine.host_empty(6)
    engine.host_free(b)
    assert engine.host_bytes == 0


def test_a_copy_that_fails_is_not_begun():
    engine = FakeEngine(eager=0)
    host, source = torch.zeros(4), torch.ones(4)
    engine.fail_at = 1
    engine.down(host, source)
    with pytest.raises(RuntimeError, match="as asked"):
        engine.down(host, source)
    engine.down(host, source)
    assert engine.waiting() == 2


def test_misuse():
    engine = FakeEngine(eager=0)
    for host, source in (
        (torch.zeros(4), torch.zeros(5)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.float64)),
        (torch.zeros(4), torch.zeros(8)[::2]),
    ):
        with pytest.raises(AssertionError):
            engine.down(host, source)
    job = engine.down(torch.zeros(4), torch.zeros(4))
    with pytest.raises(AssertionError, match="before it ended"):
        job.seconds()


def test_computation_is_a_job_that_has_ended():
    engine, ran = FakeEngine(eager=0), []
    job = engine.run(lambda: ran.append(1))
    assert ran == [1] and engine.done(job) and job.seconds() == 0
    engine.compute_waits(job)
    engine.finish(job)


def test_a_failed_assertion_is_told_again():
    """The copy that read freed memory stays at the head of its stream: whoever waits for a later one hears of it."""
    engine = FakeEngine(eager=0)
    host, source = torch.zeros(4), torch.ones(4)
    first, second = engine.down(host, torch.ones(4)), engine.down(host, source)
    for job in (first, second, first):
        with pytest.raises(AssertionError, match="was freed"):
            engine.finish(job)
