"""A product of two thin matrices beside the projection (LoRA on the head), tile by tile."""

import pytest
import torch
from torch.nn import functional as F

from hf_longmoe.schedules.vocab import LogitTransform, linear_cross_entropy, token_statistics

T, H, V, R = 50, 16, 101, 3


def draw(*shape, grad=True):
    return torch.randn(shape, dtype=torch.float64).requires_grad_(grad)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_exact(softcap, frozen):
    torch.manual_seed(0)
    hidden, weight, bias = draw(2, T // 2, H), draw(V, H, grad=not frozen), draw(V)
    u, v = draw(2, T // 2, R), draw(V, R)
    labels = torch.randint(0, V, (2, T // 2))
    labels[0, :7] = -100
    leaves = [t for t in (hidden, weight, bias, u, v) if t.requires_grad]
    options = dict(transform=LogitTransform(0.5, softcap), label_smoothing=0.1)
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, budget="32KiB", low_rank=(u, v), **options)
    logits = 0.5 * (F.linear(hidden, weight, bias) + u @ v.T)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    assert abs(loss - want) < 1e-13
    got = torch.autograd.grad(loss, leaves, torch.tensor(3.0, dtype=torch.float64))
    for a, b in zip(got, torch.autograd.grad(3 * want, leaves), strict=True):
        assert b.abs().max() > 0 and (a - b).abs().max() <= 1e-12 * b.abs().max()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_token_statistics(softcap):
    torch.manual_seed(0)
    leaves = hidden, weight, u, v = draw(T, H), draw(V, H), draw(T, R), draw(V, R)
    labels, transform = torch.randint(0, V, (T,)), LogitTransform(0.5, softcap)
    got = token_statistics(hidden, weight, labels, budget="64KiB", low_rank=(u, v), transform=transform)
    logits = 0.5 * (hidden @ weight.T + u @ v.T)
    log_p = (logits if softcap is None else softcap * torch.tanh(logits / softcap)).log_softmax(-1)
    want = log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)
    factors = torch.randn(2, T, dtype=torch.float64)
    losses = []
    for values in (got.log_probs, got.entropy), want:
        losses.append(sum((factor * value).sum() for factor, value in zip(factors, values, strict=True)))
    assert abs(losses[0] - losses[1]) <= 1e-12 * abs(losses[1])
    for a, b in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        assert b.abs().max() > 0 and (a - b).abs().max() <= 1e-12 * b.abs().max()


def test_in_half_precision_it_is_added_in_float32():
    torch.manual_seed(0)
    hidden, weight = draw(T, H).bfloat16().detach(), draw(V, H).bfloat16().detach()
    u, v = draw(T, R).float().detach().requires_grad_(), draw(V, R).float().detach().requires_grad_()
    labels = torch.randint(0, V, (T,))
    loss = linear_cross_entropy(hidden, weight, labels, budget="32KiB", low_rank=(u, v))
    want = F.cross_entropy(hidden.float() @ weight.float().T + u @ v.T, labels)
    got, wanted = torch.autograd.grad(loss, (u, v)), torch.autograd.grad(want, (u, v))
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_what_does_not_fit_is_refused():
    hidden, weight, labels = draw(T, H), draw(V, H), torch.zeros(T, dtype=torch.int64)
    for u, v in ((draw(T, R), draw(V, R + 1)), (draw(T - 1, R), draw(V, R)), (draw(T, R), draw(V - 1, R))):
        with pytest.raises(
            ValueError, match=r"low_rank \(.*\) and \(.*\) do not fit 50 tokens and a vocabulary of 101"
        ):
            linear_cross_entropy(hidden, weight, labels, budget="16KiB", low_rank=(u, v))
