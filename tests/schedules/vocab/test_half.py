"""Half precision and autocast: one final rounding, no underflow, errors no larger than the stock path's."""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hf_longmoe.schedules.vocab import LogitTransform, linear_cross_entropy, tile_bytes, token_log_probs
from hf_longmoe.schedules.vocab import head as head_module
from hf_longmoe.schedules.vocab.products import HalfOnCuda, HalfUpcast

T, H, V = 96, 32, 257
TINY = {"budget": tile_bytes(16, V, H, dtype=torch.bfloat16, keep_logits=True, bias=True)}


def make(dtype, seed, std=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=generator).to(dtype).requires_grad_()
    weight = (std * torch.randn(V, H, generator=generator)).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (T,), generator=generator)


def in_double(*tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def rms(errors):
    return torch.cat([error.flatten().double() for error in errors]).square().mean().sqrt()


class OutDtypeOnCpu(TorchFunctionMode):
    """Gives the CPU the products that only CUDA has: half operands, `out_dtype` result."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.pop("out_dtype", None) is not None:
            self.calls += 1
            *added, a, b = args
            assert a.dtype == b.dtype and a.dtype.itemsize == 2 and kwargs["out"].dtype == torch.float32
            return func(*added, a.float(), b.float(), **kwargs)
        return func(*args, **kwargs)


@pytest.fixture
def as_on_cuda(monkeypatch):
    monkeypatch.setattr(
        head_module,
        "choose_products",
        lambda rows, weight, scale=1.0: HalfOnCuda(weight.new_empty(rows, weight.shape[0]), scale),
    )
    with OutDtypeOnCpu() as mode:
        yield
    assert mode.calls


def errors_of_both_paths(dtype):
    """Errors of (loss, dh, dW) against float64, for ours and for the stock path, over 5 seeds."""
    ours, stock = [], []
    for seed in range(5):
        hidden, weight, labels = make(dtype, seed)
        exact_hidden, exact_weight = in_double(hidden, weight)
        exact = F.cross_entropy(exact_hidden @ exact_weight.T, labels)
        expected = [exact.detach(), *torch.autograd.grad(exact, (exact_hidden, exact_weight))]
        for loss, errors in (
            (linear_cross_entropy(hidden, weight, labels, **TINY), ours),
            (F.cross_entropy(F.linear(hidden, weight).float(), labels), stock),
        ):
            actual = [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]
            errors.append([a.double() - e for a, e in zip(actual, expected, strict=True)])
    return [[rms(column) for column in zip(*errors, strict=True)] for errors in (ours, stock)]


def test_bf16_error_is_at_most_the_stock_paths():
    for mine, stock in zip(*errors_of_both_paths(torch.bfloat16), strict=True):
        assert mine <= 1.05 * stock


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_error_of_the_cuda_products_is_at_most_the_stock_paths(as_on_cuda, dtype):
    for mine, stock in zip(*errors_of_both_paths(dtype), strict=True):
        assert mine <= 1.05 * stock


def test_weight_gradient_does_not_lose_precision_with_the_number_of_tiles():
    hidden, weight, labels = make(torch.bfloat16, 0)
    gradients = []
    for rows in (8, 96):
        budget = tile_bytes(rows, V, H, dtype=torch.bfloat16)
        loss = linear_cross_entropy(hidden, weight, labels, budget=budget)
        gradients.append(torch.autograd.grad(loss, weight)[0].double())
    # Rounded once, from float32 sums that differ in their last bits: nearly all entries are the same bfloat16.
    assert (gradients[0] != gradients[1]).double().mean() < 1e-2


@pytest.mark.parametrize("cuda", [False, True])
def test_fp16_gradients_with_a_loss_scale_do_not_underflow(cuda, request):
    if cuda:
        request.getfixturevalue("as_on_cuda")
    items, loss_scale = 10_000_000, 65536.0
    hidden, weight, labels = make(torch.float16, 0, std=0.3)
    exact_hidden, exact_weight = in_double(hidden, weight)
    (F.cross_entropy(exact_hidden @ exact_weight.T, labels, reduction="sum") / items).backward()
    unscaled = exact_hidden.grad.half()
    assert (unscaled == 0).double().mean() > 0.1  # what rounding before the loss scale would do
    loss = linear_cross_entropy(hidden, weight, labels, num_items=items, **TINY)
    (loss * loss_scale).backward()
    for mine, exact in ((hidden, exact_hidden), (weight, exact_weight)):
        scaled = exact.grad * loss_scale
        assert (mine.grad.double() - scaled).norm() < 1e-3 * scaled.norm()


def test_small_fp16_probabilities_reach_the_gradient(as_on_cuda):
    generator = torch.Generator().manual_seed(0)
    # Logits 8 · 2.5 below the label's: probabilities of 2e-9, which are zero in float16.
    hidden = torch.full((16, 4), 2.0, dtype=torch.float16)
    weight = torch.randn(V, 4, generator=generator).mul_(0.05).sub_(2.5).half()
    weight[0] = 0.0
    weight.requires_grad_()
    linear_cross_entropy(hidden, weight, torch.zeros(16, dtype=torch.long), budget=TINY["budget"]).mul(
        2.0**20
    ).backward()
    (exact_weight,) = in_double(weight)
    logits = hidden.double() @ exact_weight.T
    F.cross_entropy(logits, torch.zeros(16, dtype=torch.long)).mul(2.0**20).backward()
    assert logits.softmax(1)[:, 1:].max().half() == 0
    assert (weight.grad[1:] != 0).double().mean() > 0.9
    assert (weight.grad[1:].double() - exact_weight.grad[1:]).norm() < 0.05 * exact_weight.grad[1:].norm()


@pytest.mark.parametrize("strip", [1, 100, V])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_upcast_products_are_those_of_float32(strip, dtype):
    hidden, weight, _ = make(dtype, 0)
    products = HalfUpcast(torch.empty(strip, H))
    wide = products.hidden(hidden.detach())
    logits, dh, dw = torch.empty(T, V), torch.empty(T, H), torch.full((V, H), 7.0)
    products.logits(wide, weight.detach(), logits)
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    products.dh(logits, weight.detach(), dh)
    torch.testing.assert_close(dh.double(), logits.double() @ weight.double(), rtol=1e-4, atol=1e-3)
    products.dw(logits, wide, dw, first=True)
    products.dw(logits, wide, dw, first=False)
    torch.testing.assert_close(dw.double(), 2 * logits.double().T @ hidden.double(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("half_hidden", [False, True])
@pytest.mark.parametrize("call", ["loss", "log_probs"])
def test_autocast_is_honoured_and_backward_does_not_depend_on_it(backward_inside, half_hidden, call):
    hidden, weight, labels = make(torch.float32, 0)
    if half_hidden:
        hidden = hidden.detach().bfloat16().requires_grad_()

    def run(hidden, weight):
        if call == "loss":
            return linear_cross_entropy(hidden, weight, labels, **TINY)
        return token_log_probs(hidden, weight, labels, **TINY)

    with torch.autocast("cpu", torch.bfloat16):
        loss = run(hidden, weight)
        assert loss.dtype == torch.float32
        if backward_inside:
            loss.sum().backward()
    if not backward_inside:
        with torch.autocast("cpu", torch.float16):
            loss.sum().backward()
    assert hidden.grad.dtype == hidden.dtype and weight.grad.dtype == torch.float32
    # The same as casting first, as the linear layer would, but for the last rounding of what is not half.
    cast = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    expected = run(*cast)
    assert torch.equal(loss, expected)
    expected.sum().backward()
    for mine, other in zip((hidden, weight), cast, strict=True):
        assert torch.equal(mine.grad.bfloat16(), other.grad)
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


def test_autocast_leaves_float64_alone():
    hidden, weight, labels = make(torch.float64, 0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, budget="1MiB", transform=LogitTransform(0.5))
    torch.testing.assert_close(loss, F.cross_entropy(0.5 * hidden @ weight.T, labels), rtol=1e-13, atol=0)
