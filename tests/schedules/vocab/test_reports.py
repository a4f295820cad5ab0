"""Mistakes that other fused losses were reported for, so that this one does not make them."""

import pytest
import torch
import torch.nn.functional as F

from hf_longmoe.schedules.vocab import LogitTransform, linear_cross_entropy, token_log_probs

T, H, V = 24, 8, 61


def make(dtype=torch.double):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(T, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (T,), generator=generator)


def test_a_soft_cap_reaches_loss_and_gradient():
    # https://github.com/apple/ml-cross-entropy/issues/48: Gemma 2 trained without its soft cap.
    hidden, weight, labels = make()
    capped = linear_cross_entropy(hidden, weight, labels, budget="16KiB", transform=LogitTransform(softcap=0.5))
    plain = linear_cross_entropy(hidden, weight, labels, budget="16KiB")
    theirs = F.cross_entropy(0.5 * torch.tanh(hidden @ weight.T / 0.5), labels)
    torch.testing.assert_close(capped, theirs, rtol=1e-12, atol=0)
    assert (capped - plain).abs() > 0.1
    for mine, stock in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (capped, theirs)), strict=True):
        torch.testing.assert_close(mine, stock, rtol=1e-11, atol=1e-13)


def test_a_bias_is_added_once_and_gets_its_gradient():
    # https://github.com/apple/ml-cross-entropy/issues/52: losses far too low, even negative, with a bias.
    hidden, weight, labels = make()
    bias = (5 * torch.arange(V).double() / V).requires_grad_()
    ours = linear_cross_entropy(hidden, weight, labels, bias=bias, budget="16KiB")
    theirs = F.cross_entropy(F.linear(hidden, weight, bias), labels)
    assert ours > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    mine, stock = (torch.autograd.grad(loss, bias)[0] for loss in (ours, theirs))
    torch.testing.assert_close(mine, stock, rtol=1e-11, atol=1e-14)


def test_each_tokens_own_gradient_reaches_the_weight():
    # https://github.com/linkedin/Liger-Kernel/issues/968: all tokens took the first one's; zero if that was ignored.
    hidden, weight, labels = make()
    labels[0] = -100
    factors = torch.linspace(-1, 2, T, dtype=torch.double)
    ours = -(token_log_probs(hidden, weight, labels, budget="16KiB") * factors).sum()
    theirs = (F.cross_entropy(hidden @ weight.T, labels, reduction="none") * factors).sum()
    for mine, stock in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (ours, theirs)), strict=True):
        assert mine.norm() > 0
        torch.testing.assert_close(mine, stock, rtol=1e-11, atol=1e-13)


def test_accumulated_micro_batches_are_the_batch():
    # https://github.com/linkedin/Liger-Kernel/issues/802 and https://github.com/huggingface/transformers/issues/46731:
    # with num_items the loss of each micro-batch is its share of the batch's, label smoothing included.
    hidden, weight, labels = make()
    labels[:5] = -100
    items = (labels != -100).sum()
    whole = linear_cross_entropy(hidden, weight, labels, budget="16KiB", label_smoothing=0.1)
    parts = [
        linear_cross_entropy(hidden[part], weight, labels[part], budget="16KiB", label_smoothing=0.1, num_items=items)
        for part in (slice(0, 4), slice(4, 11), slice(11, T))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)
    mine, stock = (torch.autograd.grad(loss, weight)[0] for loss in (sum(parts), whole))
    torch.testing.assert_close(mine, stock, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("frozen", [False, True])
def test_float32_weights_with_bf16_hidden_states_under_autocast(frozen):
    # https://github.com/linkedin/Liger-Kernel/issues/501: the weight's gradient met operands of another dtype.
    hidden, weight, labels = make(torch.float32)
    weight.requires_grad_(not frozen)
    with torch.autocast("cpu", torch.bfloat16):
        states = F.linear(hidden, torch.eye(H))
        assert states.dtype == torch.bfloat16
        linear_cross_entropy(states, weight, labels, budget="16KiB").backward()
    assert hidden.grad.dtype == torch.float32 and (frozen or weight.grad.dtype == torch.float32)


def test_a_micro_batch_without_labels_changes_nothing():
    # https://github.com/NVIDIA-NeMo/Automodel/issues/3796: NaN from a micro-batch whose labels are all ignored.
    hidden, weight, labels = make()
    linear_cross_entropy(hidden, weight, labels, budget="16KiB", num_items=T).backward()
    before = weight.grad.clone()
    empty = torch.full_like(labels, -100)
    linear_cross_entropy(hidden, weight, empty, budget="16KiB", num_items=T).backward()
    linear_cross_entropy(hidden, weight, empty, budget="16KiB").backward()
    assert torch.equal(weight.grad, before)


def test_a_large_common_offset_does_not_round_the_loss():
    # https://github.com/ml-explore/mlx/pull/4188: log-sum-exp minus target loses the difference of large logits.
    hidden, weight, labels = make(torch.float32)
    plain = linear_cross_entropy(hidden, weight, labels, bias=torch.zeros(V), budget="16KiB")
    exact = torch.full((V,), 2.0**20)  # logits are rounded to 1/16, the loss no further
    rounded = (hidden @ weight.T + 2.0**20) - 2.0**20
    shifted = linear_cross_entropy(hidden, weight, labels, bias=exact, budget="16KiB")
    torch.testing.assert_close(shifted, F.cross_entropy(rounded, labels), rtol=1e-6, atol=0)
    assert (shifted - plain).abs() < 0.05
