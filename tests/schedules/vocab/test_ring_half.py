"""`ring_cross_entropy` on a ring of one, with the half-precision products that only CUDA has."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from hf_longmoe.schedules.vocab import fold as fold_module
from hf_longmoe.schedules.vocab import ring_cross_entropy
from hf_longmoe.schedules.vocab.products import HalfOnCuda
from hf_longmoe.schedules.wire import Pending

T, H, V = 96, 32, 257


class Alone:
    """A `Wire` to nobody else."""

    rank, size, sent_bytes = 0, 1, 0

    def gather(self, row):
        return [row.tolist()]

    def exchange(self, send, received, sent):
        assert list(received) == list(sent) == [len(send)]
        return Pending(send.clone(), send, lambda: None)

    def together(self):
        return contextlib.nullcontext()


def with_out_dtype(stock, calls):
    """A product that takes halves and `out_dtype`; also within a backward, which no torch function mode reaches."""

    def product(*operands, out_dtype=None, out=None):
        if out_dtype is None:
            return stock(*operands, out=out)
        *added, a, b = operands
        assert a.dtype == b.dtype and a.dtype.itemsize == 2 and out.dtype == out_dtype == torch.float32
        assert a.isfinite().all()
        calls.append(torch._C._current_graph_task_id() != -1)
        return stock(*added, a.float(), b.float(), out=out)

    return product


@pytest.mark.parametrize("scale", [1.0, 2.0**16], ids=["no loss scale", "loss scale"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("travel", ["tokens", "weights"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_that_return_float32(dtype, travel, frozen, scale, monkeypatch):
    made = []

    def on_cuda(rows, weight, scale=1.0):
        made.append(HalfOnCuda(weight.new_empty(rows, weight.shape[0]), scale))
        return made[-1]

    calls = []
    monkeypatch.setattr(fold_module, "choose_products", on_cuda)
    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, with_out_dtype(getattr(torch, name), calls))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_(not frozen)
    labels = torch.randint(V, (T,), generator=generator)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    (F.cross_entropy(F.linear(*exact), labels) * scale).backward()
    loss = ring_cross_entropy(hidden, weight, labels, wire=Alone(), budget=60_000, travel=travel)
    (loss * scale).backward()
    assert set(calls) == ({False} if frozen else {False, True})
    assert all(products.unit > 1 for products in made if dtype == torch.float16)
    eps = torch.finfo(dtype).eps
    for leaf, want in zip((hidden, weight), exact, strict=True):
        if leaf.requires_grad:
            error = (leaf.grad.double() - want.grad).norm() / want.grad.norm()
            # Beside rounding to the dtype: without a loss scale float16 has few bits for entries of 1e-4.
            assert error < eps if scale > 1 or dtype == torch.bfloat16 else error < 4 * eps
