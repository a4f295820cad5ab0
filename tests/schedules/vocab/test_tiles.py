import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hf_longmoe.schedules.vocab import LogitTransform, linear_cross_entropy, tile_bytes, tile_rows, token_log_probs

T, H, V = 40, 16, 101


def make(dtype=torch.float32, seed=0, tokens=T):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, V, (tokens,), generator=generator)


class ProductFlops(TorchDispatchMode):
    """Counts multiply-adds of matrix products, as 2 operations each."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = (args[0], args[1]) if func.overloadpacket == torch.ops.aten.mm else (args[1], args[2])
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("frozen", "masked", "grad", "factor"),
    [
        ((), 0, True, 6),
        ((), 16, True, 6),
        (("weight",), 0, True, 4),
        (("hidden",), 0, True, 4),
        (("hidden", "weight"), 0, True, 2),
        (("hidden", "weight", "bias"), 0, True, 2),
        ((), 0, False, 2),
        ((), T, True, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_product_is_computed_without_need(dtype, frozen, masked, grad, factor):
    hidden, weight, bias, labels = make(dtype)
    labels[:masked] = -100
    for name in frozen:
        {"hidden": hidden, "weight": weight, "bias": bias}[name].requires_grad_(False)
    with ProductFlops() as counter, torch.set_grad_enabled(grad):
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias, budget="8KiB")
        if loss.requires_grad:
            loss.backward()
    assert counter.flops == factor * (T - masked) * V * H
    assert loss.requires_grad == (grad and len(frozen) < 3)


def test_buffers_become_the_gradients_and_nothing_stays():
    hidden, weight, bias, labels = make()
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, budget="1MiB")
    buffers = loss.grad_fn.gradients
    pointers = [tensor.data_ptr() for tensor in (buffers.dh, buffers.dw, buffers.db)]
    del buffers
    loss.backward()
    assert [tensor.grad.data_ptr() for tensor in (hidden, weight, bias)] == pointers
    assert loss.grad_fn.gradients is None


def test_second_backward_needs_retain_graph_and_second_derivative_is_refused():
    hidden, weight, bias, labels = make()
    loss = linear_cross_entropy(hidden, weight, labels, budget="1MiB")
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative.*create_graph"):
        torch.autograd.grad(loss, weight, create_graph=True)
    loss = linear_cross_entropy(hidden, weight, labels, budget="1MiB")
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()
    log_probs = token_log_probs(hidden, weight, labels, budget="1MiB")
    with pytest.raises(RuntimeError, match="token_log_probs has no second derivative.*create_graph"):
        torch.autograd.grad(log_probs.sum(), weight, create_graph=True)


@pytest.mark.parametrize("tokens", [0, T])
@pytest.mark.parametrize("num_items", [None, 0, 5, torch.tensor(0), torch.tensor([7])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_valid_token_gives_zero_still_connected(tokens, num_items, dtype):
    hidden, weight, bias, labels = make(dtype, tokens=tokens)
    labels.fill_(-100)
    loss, statistics = linear_cross_entropy(
        hidden, weight, labels, bias=bias, budget="1MiB", num_items=num_items, z_loss=0.1, statistics=True
    )
    assert loss.item() == 0.0 and loss.dtype == torch.float32
    loss.backward()
    for tensor in (hidden, weight, bias):
        assert tensor.grad.dtype == dtype and tensor.grad.shape == tensor.shape and not tensor.grad.any()
    assert not statistics.log_probs.any() and not statistics.correct.any() and statistics.entropy.shape == (tokens,)

    hidden.grad = weight.grad = None
    log_probs = token_log_probs(hidden, weight, labels, budget="1MiB")
    assert log_probs.shape == (tokens,) and not log_probs.any()
    log_probs.sum().backward()
    assert not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5, 2.0)])
def test_statistics_are_those_of_the_full_logits(transform):
    hidden, weight, bias, labels = make(torch.double)
    hidden, labels = hidden.view(4, 10, H), labels.view(4, 10)
    logits = F.linear(hidden, weight, bias).detach() * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    labels[:, :3] = logits[:, :3].argmax(-1)  # some are right
    labels[0, ::4] = -100
    plain = linear_cross_entropy(hidden, weight, labels, bias=bias, budget="20KiB", transform=transform)
    loss, statistics = linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias=bias,
        budget="20KiB",
        transform=transform,
        label_smoothing=0.0,
        statistics=True,
    )
    assert loss == plain
    valid = labels != -100
    log_probs = logits.log_softmax(-1)
    expected = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * valid
    torch.testing.assert_close(statistics.log_probs, expected, rtol=1e-12, atol=1e-12)
    entropy = -(log_probs.exp() * log_probs).sum(-1) * valid
    torch.testing.assert_close(statistics.entropy, entropy, rtol=1e-12, atol=1e-12)
    assert torch.equal(statistics.correct, (logits.argmax(-1) == labels) & valid)
    assert 9 <= statistics.correct.sum() < valid.sum()
    assert not statistics.log_probs.requires_grad and not statistics.entropy.requires_grad


def test_label_smoothing_is_the_trainers():
    smoother = pytest.importorskip("transformers.trainer_pt_utils").LabelSmoother(epsilon=0.2)
    hidden, weight, _, labels = make(torch.double)
    labels[::5] = -100
    for num_items in (None, torch.tensor(71)):
        ours = linear_cross_entropy(hidden, weight, labels, budget="20KiB", label_smoothing=0.2, num_items=num_items)
        logits = (hidden @ weight.T).view(1, T, V)
        theirs = smoother({"logits": logits}, labels.view(1, T).clone(), num_items_in_batch=num_items)
        # It sums the smoothed part in float32, whatever the logits.
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_rows_fit_the_budget_and_no_more_would():
    for dtype in (torch.float32, torch.bfloat16, torch.double):
        for options in ({}, {"keep_logits": True, "bias": True}):
            for budget in (1 << 20, 5_000_001):
                rows = tile_rows(budget, 1000, 64, dtype=dtype, **options)
                assert rows % 8 == 0
                assert tile_bytes(rows, 1000, 64, dtype=dtype, **options) <= budget
                assert tile_bytes(rows + 8, 1000, 64, dtype=dtype, **options) > budget


@pytest.mark.parametrize("call", [linear_cross_entropy, token_log_probs])
def test_a_budget_below_one_tile_says_what_would_work(call):
    hidden, weight, _, labels = make()
    needed = tile_bytes(8, V, H)
    with pytest.raises(
        ValueError, match=rf"^vocab\.budget={needed - 1} .*8 rows.*{needed} bytes; \"1MiB\" would work"
    ):
        call(hidden, weight, labels, budget=needed - 1)
    call(hidden, weight, labels, budget=needed)
    call(hidden, weight, labels, budget="1MiB")
    with pytest.raises(ValueError, match="vocab.budget='much'"):
        call(hidden, weight, labels, budget="much")


@pytest.mark.parametrize("bad", [V, -1, -101, 2**40])
@pytest.mark.parametrize("call", [linear_cross_entropy, token_log_probs])
def test_a_label_out_of_range_is_named_before_any_product(call, bad):
    hidden, weight, _, labels = make()
    labels[0] = -100
    labels[17] = bad
    with ProductFlops() as counter, pytest.raises(ValueError, match=rf"labels contain {bad}, .*\[0, {V}\)") as caught:
        call(hidden, weight, labels, budget="1MiB")
    assert counter.flops == 0 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(V, H + 1)}, "do not fit"),
        ({"weight": torch.zeros(H)}, "do not fit"),
        ({"bias": torch.zeros(V + 1)}, "bias"),
        ({"labels": torch.zeros(T - 1, dtype=torch.long)}, "one label a token"),
        ({"labels": torch.zeros(T)}, "give integers"),
        ({"labels": torch.zeros(T, dtype=torch.bool)}, "give integers"),
        ({"weight": torch.zeros(V, H, dtype=torch.bfloat16)}, "hidden float32, weight bfloat16.*autocast"),
        ({"bias": torch.zeros(V, dtype=torch.double)}, "bias float64"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
        ({"z_loss": -1.0}, "z_loss=-1.0"),
        ({"num_items": 0}, "num_items=0, but 40 tokens"),
        ({"num_items": -3}, "num_items=-3"),
        ({"num_items": torch.ones(2)}, "num_items has shape"),
    ],
)
def test_bad_input_is_one_line(change, message):
    hidden, weight, _, labels = make()
    arguments = {"hidden": hidden, "weight": weight, "labels": labels, "budget": "1MiB", **change}
    with pytest.raises(ValueError, match=message) as caught:
        linear_cross_entropy(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [{"scale": float("nan")}, {"softcap": 0.0}, {"softcap": -30.0}])
def test_a_transform_that_is_none(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        LogitTransform(**arguments)


def test_a_compiled_caller_has_one_graph_break():
    hidden, weight, _, labels = make()

    def step(hidden, weight, labels):
        return linear_cross_entropy(hidden * 2, weight, labels, budget="64KiB") * 3

    eager = torch.autograd.grad(step(hidden, weight, labels), (hidden, weight))
    graphs = []
    compiled = torch.compile(step, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for _ in range(2):
        ours = torch.autograd.grad(compiled(hidden, weight, labels), (hidden, weight))
        assert torch.equal(ours[0], eager[0]) and torch.equal(ours[1], eager[1])
    assert len(graphs) == 2


def test_a_padded_vocabulary_has_no_part():
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*size, dtype=torch.double).requires_grad_() for size in ((30, 8), (50, 8), (50,))
    )
    u, v = (torch.randn(*size, dtype=torch.double).requires_grad_() for size in ((30, 2), (50, 2)))
    labels, leaves = torch.randint(0, 44, (30,)), (hidden, weight, bias, u, v)
    with torch.no_grad():
        weight[44:] = 1e3  # would be all of the log-sum-exp
    options = dict(bias=bias, low_rank=(u, v), label_smoothing=0.1, budget="16KiB")
    loss = linear_cross_entropy(hidden, weight, labels, vocab_size=44, **options)
    logits = torch.nn.functional.linear(hidden, weight, bias) + u @ v.T
    want = torch.nn.functional.cross_entropy(logits[:, :44], labels, label_smoothing=0.1)
    assert abs(loss - want) < 1e-12
    for got, wanted in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(want, leaves), strict=True):
        assert (got - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    with pytest.raises(ValueError, match="labels contain 44"):
        linear_cross_entropy(hidden, weight, labels + 1 + (43 - labels.max()), vocab_size=44, **options)
    for wrong in (0, 51):
        with pytest.raises(ValueError, match=rf"vocab_size={wrong} must be in \[1, 50\]"):
            linear_cross_entropy(hidden, weight, labels, vocab_size=wrong, **options)
