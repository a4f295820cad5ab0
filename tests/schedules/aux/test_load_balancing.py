import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hf_longmoe.schedules.aux import load_balancing_loss, router_sums

T, E, K, LAYERS = 150, 8, 2, 3


def make(dtype=torch.float32, layers=LAYERS, tokens=T, experts=E):
    generator = torch.Generator().manual_seed(0)
    return [(2 * torch.randn(tokens, experts, generator=generator)).to(dtype).requires_grad_() for _ in range(layers)]


def copies(tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def padding(kind):
    if kind is None:
        return None
    mask = torch.ones(3, T // 3, dtype=torch.long)
    mask[1, 20:] = 0
    mask[2, :7] = 0
    return mask if kind == "padded" else torch.where(mask == 1, 0.75, 0.25)


def ours(layers, top_k=K, mask=None, block_bytes=1024):
    sums = [router_sums(logits, top_k, mask, block_bytes=block_bytes) for logits in layers]
    return load_balancing_loss(sums, layers[0].shape[1])


def reference(layers, top_k, mask):
    """Equations (4) to (6) of Switch Transformers over the rows of all layers, at once, in the logits' dtype."""
    probabilities = torch.cat(layers).softmax(-1)
    chosen = torch.nn.functional.one_hot(probabilities.topk(top_k).indices, probabilities.shape[1]).sum(1)
    weights = torch.ones(T) if mask is None else mask.reshape(-1)
    weights = weights.to(probabilities).repeat(len(layers)).unsqueeze(1)
    share = (chosen * weights).sum(0) / weights.sum()
    return probabilities.shape[1] * (share * (probabilities * weights).sum(0) / weights.sum()).sum()


@pytest.mark.parametrize("mask", [None, "padded", "weighted"])
@pytest.mark.parametrize("top_k", [1, K, E])
@pytest.mark.parametrize("block_bytes", [1, 1000, 1 << 20])
def test_float64_is_exact(mask, top_k, block_bytes):
    layers, mask = make(torch.double), padding(mask)
    theirs_layers = copies(layers)
    loss, theirs = ours(layers, top_k, mask, block_bytes), reference(theirs_layers, top_k, mask)
    assert loss.dtype == torch.double
    torch.testing.assert_close(loss, theirs, rtol=1e-12, atol=0)
    (loss * -1.3).backward()
    (theirs * -1.3).backward()
    for mine, stock in zip(layers, theirs_layers, strict=True):
        # The gradient is a difference of nearly equal terms: relative to all of it, and to the terms themselves.
        assert (mine.grad - stock.grad).norm() <= 1e-12 * max(stock.grad.norm(), 1e-3)


@pytest.mark.parametrize("mask", [None, "padded"])
@pytest.mark.parametrize("top_k", [1, K])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_transformers(mask, top_k, dtype):
    layers, mask = make(dtype), padding(mask)
    theirs_layers = copies(layers)
    loss = ours(layers, top_k, mask)
    theirs = load_balancing_loss_func(tuple(theirs_layers), E, top_k, mask)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, theirs, rtol=1e-6, atol=0)
    loss.backward(), theirs.backward()
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for mine, stock in zip(layers, theirs_layers, strict=True):
        assert mine.grad.dtype == dtype
        assert (mine.grad.double() - stock.grad.double()).norm() <= tolerance * stock.grad.double().norm()


def test_all_experts_chosen_is_balanced_and_has_no_gradient():
    layers = make()
    loss = ours(layers, E)
    torch.testing.assert_close(loss, torch.tensor(float(E)))
    loss.backward()
    for logits in layers:
        assert logits.grad.abs().max() < 1e-8


def test_sums_are_those_of_the_layer():
    (logits,) = make(layers=1)
    mask = padding("padded")
    sums = router_sums(logits, K, mask, block_bytes=700)
    flat = mask.reshape(-1, 1)
    probabilities = logits.softmax(-1)
    torch.testing.assert_close(sums.probabilities, (probabilities * flat).sum(0))
    counts = (torch.nn.functional.one_hot(probabilities.topk(K).indices, E).sum(1) * flat).sum(0)
    assert torch.equal(sums.counts, counts.float())
    assert sums.rows == mask.sum() and router_sums(logits, K).rows == T
    assert sums.probabilities.requires_grad and not sums.counts.requires_grad


def test_near_ties_in_bf16_count_as_the_router_counts():
    generator = torch.Generator().manual_seed(0)
    # Logits that differ, but whose bfloat16 probabilities often do not.
    logits = (0.02 * torch.randn(500, E, generator=generator)).bfloat16()
    exact = router_sums(logits.float(), K).counts
    sums = router_sums(logits, K, block_bytes=1000)
    _, chosen = logits.softmax(-1).topk(K)
    assert torch.equal(sums.counts, chosen.reshape(-1).bincount(minlength=E).float())
    assert not torch.equal(sums.counts, exact)


def test_autocast_changes_neither_forward_nor_backward():
    (logits,) = make(torch.bfloat16, layers=1)
    outside = ours([logits])
    outside.backward()
    expected, logits.grad = logits.grad, None
    loss = ours([logits])
    with torch.autocast("cpu", torch.float16):
        loss.backward()
    assert torch.equal(logits.grad, expected)
    (theirs,) = copies([logits])
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours([logits]), load_balancing_loss_func((theirs,), E, K), rtol=1e-6, atol=0)


def test_two_backwards_and_no_second_derivative():
    layers = make()
    loss = ours(layers)
    loss.backward(retain_graph=True)
    first = layers[0].grad.clone()
    loss.backward()
    torch.testing.assert_close(layers[0].grad, 2 * first)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(ours(layers), layers, create_graph=True)


@pytest.mark.parametrize("mask", [None, "masked"])
def test_no_token_gives_zero(mask):
    (logits,) = make(layers=1, tokens=0 if mask is None else T)
    loss = ours([logits], mask=None if mask is None else torch.zeros(T))
    assert loss.item() == 0.0
    loss.backward()
    assert logits.grad.shape == logits.shape and not logits.grad.any()


def test_frozen_router():
    layers = [logits.detach() for logits in make()]
    loss = ours(layers)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, load_balancing_loss_func(tuple(layers), E, K), rtol=1e-6, atol=0)


def peak_bytes(function):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [2048, 8192])
def test_peak_is_one_block_beside_the_gradient(tokens, dtype, masked):
    block = 32 << 10
    (logits,) = make(dtype, layers=1, tokens=tokens)
    mask = torch.ones(1, tokens) if masked else None

    def step():
        logits.grad = None
        ours([logits], mask=mask, block_bytes=block).backward()

    def stock():
        logits.grad = None
        load_balancing_loss_func((logits,), E, K, mask).backward()

    step()  # the first call of a process pays for libraries
    logits.grad = None
    assert peak_bytes(step) <= logits.nbytes + block + 4096
    logits.grad = None
    assert peak_bytes(stock) > logits.nbytes + 2 * tokens * E * dtype.itemsize


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: router_sums(torch.zeros(2, 3, 4), 2), r"logits have shape \(2, 3, 4\)"),
        (lambda: router_sums(torch.zeros(3, 4), 5), "top_k=5 must be between 1 and the number of experts, 4"),
        (lambda: router_sums(torch.zeros(3, 4), 0), "top_k=0"),
        (lambda: router_sums(torch.zeros(3, 4), 2, torch.ones(4)), "mask has 4 elements for 3 tokens"),
        (lambda: load_balancing_loss([], 4), "sums is empty"),
        (lambda: load_balancing_loss([router_sums(torch.zeros(3, 4), 2)], 8), "num_experts=8.*4 experts"),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
