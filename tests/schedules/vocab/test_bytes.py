"""The peak, as the allocator sees it: bounded by the budget, whatever the number of tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from hf_longmoe.schedules.vocab import (
    LogitTransform,
    beside_bytes,
    linear_cross_entropy,
    tile_bytes,
    token_log_probs,
    token_statistics,
)

H, V = 32, 4096
STATISTICS = 16  # bytes a token


def peak_and_rest(function):
    """Bytes allocated at the peak beyond what was there, and those still there at the end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak, now


def make(tokens, dtype=torch.float32, masked=False):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, H).to(dtype).requires_grad_()
    weight = (0.1 * torch.randn(V, H)).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (tokens,))
    if masked:
        labels[::2] = -100
    return hidden, weight, labels


def beyond_gradients(tokens, budget, dtype=torch.float32, masked=False, call=linear_cross_entropy, **options):
    hidden, weight, labels = make(tokens, dtype, masked)

    def step():
        call(hidden, weight, labels, budget=budget, **options).sum().backward()

    step()  # the first call of a process pays for libraries
    hidden.grad = weight.grad = None
    peak, rest = peak_and_rest(step)
    gradients = hidden.grad.nbytes + weight.grad.nbytes
    assert rest == gradients
    return peak - gradients


def log_probs_and_entropy(*operands, **options):
    """With the entropy in the backward, which keeps logits."""
    values = token_statistics(*operands, **options)
    return values.log_probs + values.entropy


def test_at_most_3_percent_of_the_stock_peak():
    tokens = 2048
    hidden, weight, labels = make(tokens)
    stock, _ = peak_and_rest(lambda: F.cross_entropy(F.linear(hidden, weight), labels).backward())
    stock -= hidden.nbytes + weight.nbytes
    assert stock > 11 * tokens * V
    # 1/48 of 12·T·V: the proportion of 64 MiB to T = 8,192, V = 32,768.
    assert beyond_gradients(tokens, tokens * V * 12 // 48) < 0.03 * stock


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transform": LogitTransform(0.5, 10.0)},
        {"label_smoothing": 0.1, "z_loss": 1e-3},
        {"call": token_log_probs},
        {"call": log_probs_and_entropy},
    ],
    ids=["plain", "softcap", "smoothing", "log_probs", "entropy"],
)
def test_within_the_budget_and_the_same_for_four_times_the_tokens(options, dtype, masked):
    budget = 1 << 20
    few, many = (beyond_gradients(tokens, budget, dtype, masked, **options) for tokens in (512, 2048))
    # Twice: an entropy, its sum with the log-probabilities, and the gradient that both get of it.
    statistics = STATISTICS * (2 if options.get("call") is log_probs_and_entropy else 1)
    if dtype == torch.float64 and statistics > STATISTICS:
        statistics *= 2
    for tokens, peak in ((512, few), (2048, many)):
        assert peak <= budget + statistics * tokens
    assert budget / 2 < few
    assert many <= 1.02 * few + statistics * (2048 - 512)


def test_budget_decides():
    peaks = [beyond_gradients(1024, budget) for budget in ("1MiB", "2MiB", "4MiB")]
    assert 1.8 < peaks[1] / peaks[0] < 2.2 and 1.8 < peaks[2] / peaks[1] < 2.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adds_the_wide_gradients_and_nothing_else(dtype):
    budget = 1 << 20
    for tokens in (512, 2048):
        # Until their one rounding dh and dW are float32; in backward the rounded dh is made beside both.
        wide = 4 * (tokens + V) * H
        peak = beyond_gradients(tokens, budget, dtype) + 2 * (tokens + V) * H
        assert peak <= wide + max(budget, 2 * tokens * H) + STATISTICS * tokens + 1024


@pytest.mark.parametrize("tokens", [256, 2048])
@pytest.mark.parametrize(
    ("hidden", "weight"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
def test_what_autocast_and_half_precision_hold_beside_the_budget(tokens, hidden, weight):
    hidden, weight = getattr(torch, hidden), getattr(torch, weight)
    h, w, labels = make(tokens)
    h, w = h.detach().to(hidden).requires_grad_(), w.detach().to(weight).requires_grad_()
    autocast = weight == torch.float32

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = linear_cross_entropy(h, w, labels, budget="1MiB")
        loss.backward()

    step()
    h.grad = w.grad = None
    peak, _ = peak_and_rest(step)
    dtypes = {"hidden": hidden, "weight": weight, "dtype": torch.bfloat16}
    beside = beside_bytes(tokens, V, H, **dtypes, tied=True)  # a profiler cannot tell whose dW is
    gradients = 4 * (tokens + V) * H
    assert peak <= gradients + (1 << 20) + beside
    if autocast:
        assert peak > gradients + (1 << 20)  # the cast weight: without it the bound would not hold
    assert beside_bytes(tokens, V, H, **dtypes) == 16 * tokens + (
        2 * V * (H + 1) if autocast else 2 * tokens * H  # here 2·T·H is less than the cast weight
    )


def test_a_frozen_head_needs_no_memory_for_its_gradient():
    hidden, weight, labels = make(1024)
    weight.requires_grad_(False)
    peak, rest = peak_and_rest(lambda: linear_cross_entropy(hidden, weight, labels, budget="1MiB").backward())
    assert rest == hidden.nbytes and peak <= hidden.nbytes + (1 << 20) + STATISTICS * 1024


def test_no_grad_needs_only_logits():
    hidden, weight, labels = make(1024)
    with torch.no_grad():
        peak, rest = peak_and_rest(lambda: linear_cross_entropy(hidden, weight, labels, budget="1MiB"))
    assert rest == 0 and peak <= (1 << 20) + STATISTICS * 1024


def test_between_forward_and_backward_only_gradients_are_kept():
    hidden, weight, labels = make(1024)
    kept = []
    _, rest = peak_and_rest(lambda: kept.append(linear_cross_entropy(hidden, weight, labels, budget="1MiB")))
    assert rest <= hidden.nbytes + weight.nbytes + 1024
    kept.clear()
    _, rest = peak_and_rest(lambda: kept.append(token_log_probs(hidden, weight, labels, budget="1MiB")))
    assert rest <= 8 * 1024 + 1024


def test_statistics_take_their_nine_bytes_a_token():
    hidden, weight, labels = make(1024)
    budget = tile_bytes(64, V, H, keep_logits=True)

    def step():
        loss, _ = linear_cross_entropy(hidden, weight, labels, budget=budget, statistics=True)
        loss.backward()

    peak, _ = peak_and_rest(step)
    assert peak - hidden.nbytes - weight.nbytes <= budget + (STATISTICS + 9) * 1024
