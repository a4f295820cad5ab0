"""What can travel, and that it comes back in its shape, strides and sharding."""

import pytest
import torch
from torch import distributed
from torch.utils.checkpoint import checkpoint

from hf_longmoe.schedules.boundaries.layout import lay_flat

CPU = torch.device("cpu")


def _big(*shape):
    return torch.randn(*shape)


TRAVEL = {
    "plain": lambda: _big(3, 4, 5),
    "permuted": lambda: _big(3, 4, 5).permute(2, 0, 1),
    "a part of a storage": lambda: _big(6, 4, 5)[2:5],
    "expanded": lambda: _big(3, 1, 5).expand(3, 4, 5),
    "all the same": lambda: _big(1).expand(7, 3),
    "small gaps": lambda: _big(2, 100, 8)[:, :99],
    "a scalar": lambda: _big(1)[0],
    "float16": lambda: _big(3, 4).half(),
    "float64, odd length": lambda: _big(3).double(),
    "a parameter": lambda: torch.nn.Parameter(_big(3, 4)),
}
STAY = {
    "gaps": lambda: _big(2, 100, 8)[:, :90],
    "every second": lambda: _big(8)[::2],
    "empty": lambda: _big(0, 4),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "another device": lambda: torch.empty(3, device="meta"),
    "a subclass": lambda: _big(3).as_subclass(type("Own", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("name", TRAVEL)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["the same memory", "other memory"])
def test_there_and_back(name, elsewhere):
    tensor = TRAVEL[name]()
    flat, layout = lay_flat(tensor, CPU)
    assert flat.dim() == 1 and flat.is_contiguous() and not flat.requires_grad
    assert flat.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert flat.nbytes <= 1.02 * tensor.nbytes
    back = layout.restore(flat.clone() if elsewhere else flat)
    assert torch.equal(back, tensor) and back.stride() == tensor.stride() and back.dtype == tensor.dtype


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name):
    assert lay_flat(STAY[name](), CPU) is None


def test_an_inference_tensor_stays():
    with torch.inference_mode():
        tensor = torch.ones(3)
    assert lay_flat(tensor, CPU) is None


@pytest.mark.parametrize("name", TRAVEL)
def test_through_a_checkpoint(kit, name, reentrant):
    """Whatever the layout, the replay sees the same strides as the first pass."""
    tensor = TRAVEL[name]().detach().requires_grad_()
    seen = []

    def region(x):
        seen.append((x.stride(), x.detach().clone()))
        return x.sin().sum()

    engine = kit.FakeEngine(eager=0)
    with kit.BoundaryOffload(engine) as offload:
        offload.begin(count=3)
        loss = offload.checkpoint(checkpoint, region, tensor * 1, use_reentrant=reentrant)
        loss = loss + offload.checkpoint(checkpoint, region, torch.ones(2), use_reentrant=False)
        assert offload.offloaded == 2
        (got,) = torch.autograd.grad(loss, tensor) if not reentrant else [loss.backward() or tensor.grad]
    first, replay = seen[0], seen[-1]
    assert first[0] == replay[0] and torch.equal(first[1], replay[1])
    assert torch.equal(got, tensor.detach().cos())
    assert engine.sent["up"] > 0


def test_the_first_floating_tensor_is_the_boundary(kit, reentrant):
    engine, got = kit.FakeEngine(), []
    ids, mask = torch.arange(4), torch.ones(4, dtype=torch.bool)
    x, other = (torch.randn(4, requires_grad=True) for _ in range(2))

    def region(ids, x, none, mask, other):
        got.append((ids.data_ptr(), mask.data_ptr(), other.data_ptr()))
        return (x * other)[ids][mask].sum()

    with kit.BoundaryOffload(engine) as offload:
        offload.begin(count=2)
        loss = offload.checkpoint(checkpoint, region, ids, x * 1, None, mask, other, use_reentrant=reentrant)
        loss.backward()
    assert torch.equal(x.grad, other.detach()) and torch.equal(other.grad, x.detach())
    assert engine.sent["down"] == x.nbytes
    assert got[0] == got[1]  # the others are what they were, not copies


@pytest.fixture
def mesh(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_a_sharded_tensor(kit, mesh, reentrant):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    x, w = torch.randn(4, 6), torch.randn(6, 6)

    def region(x, w):
        assert isinstance(x, DTensor) and x.placements == (Shard(0),) and x.shape == (4, 6) and x.stride() == (6, 1)
        return (x @ w).sin()

    def run(offload):
        a = DTensor.from_local(x, mesh, [Shard(0)]).requires_grad_()
        b = DTensor.from_local(w, mesh, [Replicate()]).requires_grad_()
        if offload is None:
            loss = checkpoint(region, a * 1, b, use_reentrant=reentrant)
        else:
            offload.begin(count=2)
            loss = offload.checkpoint(checkpoint, region, a * 1, b, use_reentrant=reentrant)
            offload.checkpoint(checkpoint, torch.sin, torch.ones(2), use_reentrant=False)  # the first one may go
        loss.sum().backward()
        return a.grad.to_local(), b.grad.to_local()

    want = run(None)
    for seed in range(4):
        engine = kit.FakeEngine(seed, eager=0)
        with kit.BoundaryOffload(engine) as offload:
            assert kit.equal(run(offload), want)
        assert engine.sent == {"down": x.nbytes, "up": x.nbytes}
        assert engine.host_bytes == engine.device_bytes == 0
