"""Slabs of exact sizes, a budget that pools share, and how much host memory there is."""

import pytest
import torch

from hf_longmoe.schedules.host import (
    FakeEngine,
    HostBudget,
    HostPool,
    check_host_memory,
    control_groups,
    host_memory_available,
)
from hf_longmoe.schedules.host import memory as memory_module


def _pool(limit=None):
    engine = FakeEngine(eager=0)
    budget = HostBudget(limit)
    return engine, budget, HostPool(engine, budget)


def test_exact_sizes_used_again():
    engine, budget, pool = _pool()
    slabs = [pool.take(n) for n in (100, 37, 100)]
    assert [slab.memory.numel() for slab in slabs] == [100, 37, 100]
    assert pool.nbytes == budget.taken == engine.host_bytes == 237
    for slab in slabs:
        pool.give(slab)
    assert pool.take(37) is slabs[1] and pool.take(50) in (slabs[0], slabs[2])
    assert pool.nbytes == engine.peak_host_bytes == 237


def test_a_view():
    _, _, pool = _pool()
    slab = pool.take(20)
    view = slab.view(4, torch.float32)
    assert view.shape == (4,) and view.data_ptr() == slab.memory.data_ptr()


def test_it_grows_without_keeping_what_became_too_small():
    engine, _, pool = _pool()
    for size in (10, 25, 40):
        slabs = [pool.take(size) for _ in range(3)]
        for slab in slabs:
            pool.give(slab)
        assert pool.nbytes == engine.host_bytes == 3 * size
    slabs = [pool.take(10) for _ in range(3)]
    assert pool.nbytes == 120  # shorter ones make no new ones


def test_idle_memory_makes_way_before_new_is_made():
    engine, _, pool = _pool(limit=60)
    first = [pool.take(20) for _ in range(3)]
    for slab in first:
        pool.give(slab)
    assert pool.take(60).memory.numel() == 60 and engine.peak_host_bytes == 60


def test_the_budget_is_shared_and_given_back():
    engine = FakeEngine()
    budget = HostBudget(100)
    a, b = HostPool(engine, budget), HostPool(engine, budget)
    slab = a.take(60)
    assert b.take(50) is None and budget.taken == 60
    assert b.take(40) is not None and b.take(1) is None
    a.give(slab)
    a.close()
    assert budget.taken == 40 and b.take(60) is not None


def test_memory_that_is_not_there_does_not_count_as_taken():
    engine, budget, pool = _pool()
    engine.host_limit = 50
    with pytest.raises(MemoryError):
        pool.take(51)
    assert budget.taken == pool.nbytes == 0 and pool.take(50) is not None


def test_memory_that_the_machine_lacks_is_not_asked_for(monkeypatch):
    """An engine would get it, and the process be killed as it is pinned."""
    engine, budget, pool = _pool()
    monkeypatch.setattr(memory_module, "host_memory_available", lambda: 50)
    with pytest.raises(MemoryError, match="needs 51 B of host memory, but 50 B are free"):
        pool.take(51)
    assert budget.taken == pool.nbytes == engine.host_bytes == 0 and pool.take(50) is not None


def test_jobs_of_the_last_use_are_handed_on_and_waited_for_before_it_is_freed():
    engine, _, pool = _pool()
    slab, source = pool.take(4), torch.arange(4, dtype=torch.uint8)
    job = engine.down(slab.view(4, torch.uint8), source)
    pool.give(slab, [job])
    slab = pool.take(4)
    assert slab.after == [job]
    pool.give(slab)  # not used by anything new; the old one still runs
    assert slab.after == [job] and engine.waiting() == 1
    pool.close()
    assert engine.waiting() == engine.host_bytes == 0


def test_jobs_that_have_ended_are_not_kept():
    engine, _, pool = _pool()
    slab = pool.take(4)
    source = torch.zeros(4, dtype=torch.uint8)
    job = engine.down(slab.view(4, torch.uint8), source)
    engine.finish(job)
    pool.give(slab, [job])
    assert slab.after == []


def test_close_leaves_what_is_in_use():
    engine, budget, pool = _pool()
    used, idle = pool.take(10), pool.take(20)
    pool.give(idle)
    pool.close()
    assert engine.host_bytes == pool.nbytes == budget.taken == 10
    pool.give(used)
    pool.close()
    assert engine.host_bytes == pool.nbytes == budget.taken == 0


def test_the_error_has_both_numbers(monkeypatch):
    monkeypatch.setattr(memory_module, "host_memory_available", lambda: 3 << 30)
    check_host_memory(3 << 30, "this")
    with pytest.raises(MemoryError, match="this needs 4 GiB of host memory, but 3 GiB are free"):
        check_host_memory(4 << 30, "this")
    with pytest.raises(MemoryError, match="this needs 1 GiB .*each of 4 local ranks, 4 GiB in all"):
        check_host_memory(1 << 30, "this", ranks=4)


def _group(folder, limit, used, stat):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("max", limit), ("current", used), ("stat", stat)):
        (folder / f"memory.{name}").write_text(text)


def test_the_limit_of_a_container(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_module.psutil, "virtual_memory", lambda: type("M", (), {"available": 1000}))
    (tmp_path / "groups").write_text("0::/job/step\n")
    left = control_groups.control_group_memory
    monkeypatch.setattr(memory_module, "control_group_memory", lambda: left(tmp_path / "fs", tmp_path / "groups"))
    for limit, used, stat, want in (
        ("700\n", "300\n", "anon 5\ninactive_file 150\n", 550),  # page cache can be dropped
        ("max\n", "300\n", "inactive_file 1\n", 1000),
        ("100\n", "300\n", "anon 5\n", 0),
        ("5000\n", "300\n", "anon 5\n", 1000),
    ):
        for group in ("job/step", "job"):  # its own, and one above it
            _group(tmp_path / "fs" / group, limit, used, stat)
            assert host_memory_available() == want
            _group(tmp_path / "fs" / group, "max", "0", "")
    assert host_memory_available() == 1000
