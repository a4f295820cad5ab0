"""`token_statistics`: every value and gradient is that of the full logits, within the budget."""

import pytest
import torch
import torch.nn.functional as F

from hf_longmoe.schedules.vocab import LogitTransform, linear_cross_entropy, tile_bytes, token_statistics

T, H, V = 40, 16, 101
ALL = ("entropy", "correct", "mean_logits", "log_sum_squares")


def make(dtype=torch.double):
    torch.manual_seed(0)
    operands = [torch.randn(*shape, dtype=dtype).requires_grad_() for shape in ((4, T // 4, H), (V, H), (V,))]
    labels = torch.randint(0, V, (4, T // 4))
    return *operands, labels


def logits_of(hidden, weight, bias, transform):
    logits = F.linear(hidden, weight, bias) * transform.scale
    return logits if transform.softcap is None else transform.softcap * torch.tanh(logits / transform.softcap)


@pytest.mark.parametrize("upstream", ["log_probs", "entropy", "both"])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5, 2.0)], ids=["plain", "softcap"])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_are_those_of_the_full_logits(masked, transform, upstream):
    hidden, weight, bias, labels = make()
    logits = logits_of(hidden, weight, bias, transform)
    labels[:, :3] = logits[:, :3].argmax(-1)  # some are right
    if masked:
        labels[0, ::2] = -100
    valid = labels != -100
    log_p = logits.log_softmax(-1)
    want = {
        "log_probs": log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * valid,
        "entropy": -(log_p.exp() * log_p).sum(-1) * valid,
        "correct": (logits.argmax(-1) == labels) & valid,
        "mean_logits": logits.mean(-1) * valid,
        "log_sum_squares": (2 * log_p).logsumexp(-1) * valid,
    }
    got = token_statistics(
        hidden, weight, labels, bias=bias, fields=ALL, budget=tile_bytes(8, V, H, dtype=torch.double, bias=True,
        keep_logits=True), transform=transform,
    )  # fmt: skip
    for name, value in want.items():
        found = getattr(got, name)
        assert found.shape == labels.shape and found.requires_grad == (name in ("log_probs", "entropy"))
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12, msg=name)
    assert 10 <= got.correct.sum() < valid.sum()

    factors = torch.randn(2, *labels.shape, dtype=torch.double)
    losses = []
    for values in (got.log_probs, got.entropy), (want["log_probs"], want["entropy"]):
        terms = [(factor * value).sum() for factor, value in zip(factors, values, strict=True)]
        losses.append({"log_probs": terms[0], "entropy": terms[1], "both": sum(terms)}[upstream])
    ours, stock = (torch.autograd.grad(loss, (hidden, weight, bias)) for loss in losses)
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * b.abs().max().item())


def test_only_what_is_asked_for():
    hidden, weight, _, labels = make()
    got = token_statistics(hidden, weight, labels, fields=("entropy",), budget="64KiB")
    assert (got.correct, got.mean_logits, got.log_sum_squares) == (None, None, None) and got.entropy is not None
    with pytest.raises(ValueError, match="fields=.* has 'accuracy'; choose among entropy, correct"):
        token_statistics(hidden, weight, labels, fields=("accuracy",), budget="64KiB")
    # An entropy that can be differentiated needs a tile of its logits beside the probabilities.
    least = tile_bytes(8, V, H, dtype=torch.double)
    got = token_statistics(hidden, weight, labels, budget=least)
    got.log_probs.sum().backward(retain_graph=True)
    with pytest.raises(ValueError, match=f"vocab.budget={least} .* too small"):
        got.entropy.sum().backward()


def test_they_are_the_statistics_of_the_loss():
    hidden, weight, bias, labels = make(torch.float32)
    loss, of_loss = linear_cross_entropy(hidden, weight, labels, bias=bias, budget="64KiB", statistics=True)
    got = token_statistics(hidden, weight, labels, bias=bias, budget="64KiB")
    torch.testing.assert_close(-got.log_probs.mean(), loss)
    torch.testing.assert_close(got.log_probs, of_loss.log_probs)
    torch.testing.assert_close(got.entropy, of_loss.entropy)
    assert torch.equal(got.correct, of_loss.correct)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    """Accumulated in float32: the values of the same operands in float64, to float32's rounding."""
    hidden, weight, bias, labels = make(dtype)
    exact = token_statistics(*(t.double() for t in (hidden, weight)), labels, fields=ALL, budget="64KiB")
    got = token_statistics(hidden, weight, labels, fields=ALL, budget="64KiB")
    with torch.autocast("cpu", dtype=dtype):
        cast = token_statistics(hidden.float(), weight.float(), labels, fields=ALL, budget="64KiB")
    for name in ("log_probs", "entropy", "mean_logits", "log_sum_squares"):
        value = getattr(got, name)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), getattr(exact, name), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(getattr(cast, name), value)
    got.log_probs.sum().backward()
    assert hidden.grad.dtype == dtype and weight.grad.any()
