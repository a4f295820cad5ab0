"""Gradients are bitwise those of boundaries that stay on the device, however late the copies are."""

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("routed", [False, True])
def test_gradients(kit, reentrant, depth, dtype, routed):
    expected = kit.train(kit.Stack(5, dtype, reentrant, routed=routed), kit.ids)
    for seed in range(12):
        engine = kit.FakeEngine(seed, eager=(0, 0.3, 0.8)[seed % 3])
        with kit.BoundaryOffload(engine, depth=depth) as offload:
            stack = kit.Stack(5, dtype, reentrant, offload, routed)
            for _ in range(3):
                assert kit.equal(kit.train(stack, kit.ids), expected), f"seed {seed}"
                assert offload.offloaded == 4 and offload.left == 1
                assert engine.device_bytes == 0
            assert engine.sent["down"] > 0 and engine.sent == offload.sent
        assert engine.waiting() == engine.host_bytes == offload.host_bytes == 0


def test_uneven_lengths(kit, reentrant):
    """Packed batches: each step has another length; host memory is that of the longest."""
    plain = kit.Stack(4, reentrant=reentrant)
    batches = [kit.ids[:, :n] for n in (3, 7, 5, 1, 7, 2)]
    expected = [kit.train(plain, ids) for ids in batches]
    for seed in range(6):
        engine = kit.FakeEngine(seed)
        with kit.BoundaryOffload(engine) as offload:
            stack = kit.Stack(4, reentrant=reentrant, offload=offload)
            for ids, want in zip(batches, expected, strict=True):
                assert kit.equal(kit.train(stack, ids), want)
                assert engine.device_bytes == 0
            assert engine.peak_host_bytes <= 1.02 * 3 * kit.nbytes
        assert engine.host_bytes == 0


def test_a_boundary_need_not_require_a_gradient(kit):
    """PEFT: the first layers' inputs do not."""
    from torch.utils.checkpoint import checkpoint

    weight = torch.randn(16, 16, requires_grad=True)
    x = torch.randn(3, 16)
    want = torch.autograd.grad(checkpoint(lambda x: (x @ weight).sin().sum(), x, use_reentrant=False), weight)[0]
    engine = kit.FakeEngine()
    with kit.BoundaryOffload(engine) as offload:
        offload.begin(count=2)
        loss = offload.checkpoint(checkpoint, lambda x: (x @ weight).sin().sum(), x, use_reentrant=False)
        assert offload.offloaded == 1
        assert torch.equal(torch.autograd.grad(loss, weight)[0], want)
    assert engine.sent["down"] == x.nbytes


def test_nothing_is_done_where_no_graph_is_built(kit, reentrant):
    engine = kit.FakeEngine()
    offload = kit.BoundaryOffload(engine)
    stack = kit.Stack(3, reentrant=reentrant, offload=offload)
    stack(kit.ids).backward()
    sent, taken = offload.sent, offload.host_bytes
    with torch.no_grad():
        stack(kit.ids)
    with torch.inference_mode():
        stack(kit.ids)
    assert offload.sent == sent and offload.host_bytes == taken and offload.offloaded == 2
    offload.close()
    stack(kit.ids).backward()
    assert offload.sent == sent and engine.host_bytes == 0


def test_without_an_engine_it_only_calls(kit, reentrant):
    want = kit.train(kit.Stack(3, reentrant=reentrant), kit.ids)
    offload = kit.BoundaryOffload(None)
    offload.reserve(64, 2)
    assert kit.equal(kit.train(kit.Stack(3, reentrant=reentrant, offload=offload), kit.ids), want)
    offload.close()
    assert offload.host_bytes == offload.offloaded == offload.left == sum(offload.sent.values()) == 0


@pytest.mark.parametrize("outer, inner", [(False, False), (False, True), (True, False), (True, True)])
def test_checkpoints_within_checkpoints(kit, outer, inner):
    """A checkpointed group of checkpointed layers: both passes over the group must save the same."""
    from torch.utils.checkpoint import checkpoint

    def run(offload):
        stack = kit.Stack(4, reentrant=inner, offload=offload)
        x = stack.embed(kit.ids)
        torch.manual_seed(3)
        for group in (stack.layers[:2], stack.layers[2:]):

            def region(x, group=group):
                for layer in group:
                    x = stack.call(layer, x, stack.scale)
                return x

            if offload is None:
                x = checkpoint(region, x, use_reentrant=outer)
            else:
                x = offload.checkpoint(checkpoint, region, x, use_reentrant=outer)
        x.square().sum().backward()
        return stack.gradients()

    want = run(None)
    for seed in range(6):
        engine = kit.FakeEngine(seed)
        with kit.BoundaryOffload(engine) as offload:
            offload.begin(count=6)
            assert kit.equal(run(offload), want)
        assert engine.host_bytes == engine.device_bytes == engine.waiting() == 0
