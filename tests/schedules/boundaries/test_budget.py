"""Host memory: the budget, what happens where there is none, reservation, and close."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_longmoe.schedules.boundaries import offload as offload_module


@pytest.mark.parametrize("k", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_budget_of_k_boundaries_offloads_k(kit, reentrant, k, depth):
    want = kit.train(kit.Stack(6, reentrant=reentrant), kit.ids)
    for seed in range(4):
        engine = kit.WatchedEngine(seed)
        with kit.BoundaryOffload(engine, host_budget=k * kit.nbytes + kit.nbytes // 2, depth=depth) as offload:
            stack = kit.Stack(6, reentrant=reentrant, offload=offload)
            for step in range(3):
                alive = kit.Alive(engine, kit.nbytes)
                stack.births = alive.born
                assert kit.equal(kit.train(stack, kit.ids), want)
                assert (offload.offloaded, offload.left) == (min(k, 5), 6 - min(k, 5))
                assert alive.most <= 6 - min(k, 5) + depth + (step == 0) and alive.now() == 0
            assert engine.peak_host_bytes == offload.host_bytes == min(k, 5) * kit.nbytes
        assert engine.host_bytes == 0


def test_the_budget_is_for_what_layers_keep_too(kit, reentrant):
    want = kit.train(kit.Stack(6, reentrant=reentrant, routed=True), kit.ids)
    engine = kit.FakeEngine()
    with kit.BoundaryOffload(engine, host_budget=2 * kit.nbytes) as offload:
        stack = kit.Stack(6, reentrant=reentrant, offload=offload, routed=True)
        for _ in range(2):
            assert kit.equal(kit.train(stack, kit.ids), want)
        assert engine.peak_host_bytes <= 2 * kit.nbytes


def test_no_host_memory(kit, reentrant):
    """Within the budget, but the machine does not have it: told once, and the rest stays on the device."""
    want = kit.train(kit.Stack(6, reentrant=reentrant), kit.ids)
    engine = kit.FakeEngine()
    engine.host_limit = 2 * kit.nbytes
    with kit.BoundaryOffload(engine) as offload:
        stack = kit.Stack(6, reentrant=reentrant, offload=offload)
        with pytest.warns(UserWarning, match="stay on the device") as told:
            for _ in range(3):
                assert kit.equal(kit.train(stack, kit.ids), want)
                assert (offload.offloaded, offload.left) == (2, 4)
        assert len([warning for warning in told if "stay on the device" in str(warning.message)]) == 1
    assert engine.host_bytes == 0


def test_reserved(kit, reentrant):
    engine = kit.FakeEngine()
    with kit.BoundaryOffload(engine) as offload:
        offload.reserve(kit.nbytes, 5)
        offload.reserve(kit.nbytes, 5)  # the same ones
        assert engine.host_bytes == offload.host_bytes == 5 * kit.nbytes
        stack = kit.Stack(6, reentrant=reentrant, offload=offload)
        engine.host_limit = 0
        kit.train(stack, kit.ids)
        assert offload.offloaded == 5
    assert engine.host_bytes == 0


def test_no_more_is_reserved_than_the_budget_has(kit):
    engine = kit.FakeEngine()
    with kit.BoundaryOffload(engine, host_budget=3 * kit.nbytes + 1) as offload:
        offload.reserve(kit.nbytes, 5)
        assert engine.host_bytes == 3 * kit.nbytes


def test_a_reservation_that_cannot_be_had(kit, monkeypatch):
    engine = kit.FakeEngine()
    offload = kit.BoundaryOffload(engine)
    with pytest.raises(MemoryError, match="8 checkpoint boundaries of .* needs .* of host memory, but .* are free"):
        offload.reserve(1 << 50, 8)
    engine.host_limit = 100
    with pytest.raises(MemoryError, match="60 bytes"):
        offload.reserve(60, 2)
    offload.close()
    assert engine.host_bytes == 0
    asked = []
    monkeypatch.setattr(offload_module, "check_host_memory", lambda *args: asked.append(args))
    kit.BoundaryOffload(kit.FakeEngine()).reserve(64, 3, ranks=4)
    assert asked[0][0] == 192 and asked[0][2] == 4


@pytest.mark.parametrize("bad", [{"depth": 0}, {"host_budget": -1}])
def test_bad_arguments(kit, bad):
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name}={bad[name]}"):
        kit.BoundaryOffload(kit.FakeEngine(), **bad)


@pytest.mark.parametrize("when", ["before it is sent", "on its way", "by the next layer"])
def test_a_boundary_that_is_changed_too_early(kit, when, reentrant):
    engine = kit.FakeEngine(eager=0)
    offload = kit.BoundaryOffload(engine)
    offload.begin(count=1 if when == "before it is sent" else 3)
    weight = torch.ones(4, requires_grad=True)
    x = weight * 2

    def second(y):
        if when == "by the next layer":
            x.add_(1)
        return (y * 3).sum()

    y = offload.checkpoint(checkpoint, torch.sin, x, use_reentrant=reentrant)
    if when != "by the next layer":
        x.add_(1)
        loss = offload.checkpoint(checkpoint, second, y, use_reentrant=reentrant)
        with pytest.raises(RuntimeError, match=r"changed in place before its copy to host memory had ended"):
            loss.backward()
        del loss
    else:  # by then the copy has been waited for
        offload.checkpoint(checkpoint, second, y, use_reentrant=reentrant).backward()
        assert torch.equal(weight.grad, 2 * 3 * torch.full((4,), 2.0).cos())
    del y
    offload.close()
    assert engine.host_bytes == engine.waiting() == 0


def test_another_saved_tensor_that_is_changed(kit):
    """Autograd's own check still holds for what passes through."""
    engine = kit.FakeEngine()
    other = torch.ones(4)
    with kit.BoundaryOffload(engine) as offload:
        x = torch.randn(4, requires_grad=True)
        loss = offload.checkpoint(checkpoint, lambda x, o: (x * o).sum(), x * 1, other, use_reentrant=False)
        other.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
