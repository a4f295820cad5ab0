"""The vocabulary schedule in float64: loss and gradients equal to those from full logits, every option, any budget."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from hf_longmoe.schedules.vocab import LogitTransform, linear_cross_entropy, tile_bytes, token_log_probs

H, V = 12, 53


def make(shape, seed=0, bias=True):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, H, generator=generator, dtype=torch.double).requires_grad_()
    weight = torch.randn(V, H, generator=generator, dtype=torch.double).requires_grad_()
    bias = torch.randn(V, generator=generator, dtype=torch.double).requires_grad_() if bias else None
    labels = torch.randint(0, V, shape, generator=generator)
    return hidden, weight, bias, labels


def copies(*tensors):
    return [None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


def full_logits(hidden, weight, bias, transform):
    logits = F.linear(hidden, weight, bias) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    return logits.view(-1, weight.shape[0])


def reference(hidden, weight, bias, labels, transform, ignore_index, num_items, label_smoothing, z_loss):
    logits, labels = full_logits(hidden, weight, bias, transform), labels.reshape(-1)
    total = F.cross_entropy(
        logits, labels, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )
    valid = labels != ignore_index
    total = total + z_loss * logits.logsumexp(1)[valid].square().sum()
    return total / (valid.sum() if num_items is None else num_items)


def budget_for(rows, bias, keep_logits):
    return tile_bytes(rows, V, H, dtype=torch.double, keep_logits=keep_logits, bias=bias)


def assert_close(ours, theirs):
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert (ours - theirs).norm() <= 1e-12 * theirs.norm()


def check(shape, *, rows, bias, transform, masked, num_items, label_smoothing, z_loss, upstream=1.0, seed=0):
    hidden, weight, bias, labels = make(shape, seed, bias)
    if masked:
        labels.view(-1)[::3] = -100
    ref_hidden, ref_weight, ref_bias = copies(hidden, weight, bias)
    theirs = reference(ref_hidden, ref_weight, ref_bias, labels, transform, -100, num_items, label_smoothing, z_loss)
    ours = linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias=bias,
        budget=budget_for(rows, bias is not None, transform.softcap is not None),
        num_items=num_items,
        transform=transform,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    assert_close(ours, theirs)
    (ours * upstream).backward()
    (theirs * upstream).backward()
    for mine, stock in ((hidden, ref_hidden), (weight, ref_weight), (bias, ref_bias)):
        if mine is not None:
            assert_close(mine.grad, stock.grad)


PLAIN = {
    "bias": False,
    "transform": LogitTransform(),
    "masked": False,
    "num_items": None,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
}


@pytest.mark.parametrize("rows", [8, 16, 24, 64])
@pytest.mark.parametrize("tokens", [1, 7, 8, 40, 41, 63])
def test_any_budget_and_any_number_of_tokens(rows, tokens):
    check((tokens,), rows=rows, **PLAIN)
    check((tokens,), rows=rows, **{**PLAIN, "masked": tokens > 1})


@pytest.mark.parametrize(
    ("softcap", "scale", "bias", "masked", "num_items"),
    list(itertools.product([None, 2.5], [1.0, 1 / 3], [False, True], [False, True], [None, 17, "tensor"])),
)
def test_every_combination_of_options(softcap, scale, bias, masked, num_items):
    num_items = torch.tensor(23) if num_items == "tensor" else num_items
    for label_smoothing, z_loss in itertools.product([0.0, 0.1], [0.0, 1e-2]):
        check(
            (3, 11),
            rows=8,
            bias=bias,
            transform=LogitTransform(scale, softcap),
            masked=masked,
            num_items=num_items,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            upstream=-1.7,
        )


@pytest.mark.parametrize("frozen", [("hidden",), ("weight",), ("bias",), ("weight", "bias"), ("hidden", "weight")])
@pytest.mark.parametrize("masked", [False, True])
def test_frozen_tensors(frozen, masked):
    hidden, weight, bias, labels = make((5, 9))
    if masked:
        labels[1, ::2] = -100
    tensors = {"hidden": hidden, "weight": weight, "bias": bias}
    for name in frozen:
        tensors[name].requires_grad_(False)
    ref = copies(hidden, weight, bias)
    linear_cross_entropy(hidden, weight, labels, bias=bias, budget=budget_for(16, True, False)).backward()
    reference(*ref, labels, LogitTransform(), -100, None, 0.0, 0.0).backward()
    for (name, mine), stock in zip(tensors.items(), ref, strict=True):
        if name in frozen:
            assert mine.grad is None
        else:
            assert_close(mine.grad, stock.grad)


def test_large_logits_do_not_cancel():
    hidden, weight, bias, labels = make((40,))
    with torch.no_grad():
        hidden *= 300
        bias += 1e4
    ref = copies(hidden, weight, bias)
    ours = linear_cross_entropy(hidden, weight, labels, bias=bias, budget=budget_for(8, True, False))
    theirs = reference(*ref, labels, LogitTransform(), -100, None, 0.0, 0.0)
    ours.backward(), theirs.backward()
    assert_close(ours, theirs)
    assert_close(weight.grad, ref[1].grad)


def test_gradients_accumulate_over_two_batches():
    hidden, weight, bias, labels = make((30,))
    ref = copies(hidden, weight, bias)
    for start in (0, 13):
        part = slice(start, start + 17)
        budget = budget_for(8, True, False)
        linear_cross_entropy(hidden[part], weight, labels[part], bias=bias, budget=budget, num_items=30).backward()
        reference(ref[0][part], ref[1], ref[2], labels[part], LogitTransform(), -100, 30, 0.0, 0.0).backward()
    for mine, stock in zip((hidden, weight, bias), ref, strict=True):
        assert_close(mine.grad, stock.grad)


def test_two_backwards_through_one_graph():
    hidden, weight, bias, labels = make((30,))
    ref = copies(hidden, weight, bias)
    ours = linear_cross_entropy(hidden, weight, labels, bias=bias, budget=budget_for(8, True, False))
    theirs = reference(*ref, labels, LogitTransform(), -100, None, 0.0, 0.0)
    for factor, retain in ((2.0, True), (-0.5, True), (3.0, False)):
        (ours * factor).backward(retain_graph=retain)
        (theirs * factor).backward(retain_graph=retain)
        for mine, stock in zip((hidden, weight, bias), ref, strict=True):
            assert_close(mine.grad, stock.grad)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        ours.backward()


def test_a_tied_weight_receives_both_gradients():
    _, weight, _, labels = make((30,), bias=False)
    (ref,) = copies(weight)
    tokens = torch.arange(30)
    linear_cross_entropy(
        F.embedding(tokens, weight).tanh(), weight, labels, budget=budget_for(8, False, False)
    ).backward()
    F.cross_entropy(F.embedding(tokens, ref).tanh() @ ref.T, labels).backward()
    assert_close(weight.grad, ref.grad)


def test_ignore_index_inside_the_vocabulary_and_int32_labels():
    hidden, weight, bias, labels = make((40,))
    labels[::4] = 5
    ref = copies(hidden, weight, bias)
    budget = budget_for(8, True, False)
    ours = linear_cross_entropy(hidden, weight, labels.int(), bias=bias, budget=budget, ignore_index=5)
    theirs = reference(*ref, labels, LogitTransform(), 5, None, 0.0, 0.0)
    ours.backward(), theirs.backward()
    assert_close(ours, theirs)
    assert_close(hidden.grad, ref[0].grad)


def test_not_contiguous_tensors():
    hidden, weight, bias, labels = make((4, 9))
    ref = copies(hidden, weight, bias)
    columns = weight.T.contiguous().detach().requires_grad_()
    budget = budget_for(8, True, False)
    linear_cross_entropy(hidden.transpose(0, 1)[1:], columns.T, labels.T[1:], bias=bias, budget=budget).backward()
    reference(ref[0].transpose(0, 1)[1:], *ref[1:], labels.T[1:], LogitTransform(), -100, None, 0.0, 0.0).backward()
    assert_close(hidden.grad, ref[0].grad)
    assert_close(columns.grad, ref[1].grad.T)


@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [8, 64])
def test_token_log_probs_with_a_gradient_that_differs_between_tokens(softcap, masked, rows):
    hidden, weight, bias, labels = make((3, 11))
    if masked:
        labels[:, ::3] = -100
    ref = copies(hidden, weight, bias)
    transform = LogitTransform(0.7, softcap)
    budget = budget_for(rows, True, softcap is not None)
    ours = token_log_probs(hidden, weight, labels, bias=bias, budget=budget, transform=transform)
    logits = full_logits(*ref, transform).log_softmax(-1).view(3, 11, V)
    theirs = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (labels != -100)
    assert_close(ours, theirs)
    upstream = torch.randn(3, 11, dtype=torch.double)
    ours.backward(upstream, retain_graph=True)
    ours.backward(upstream)
    theirs.backward(2 * upstream)
    for mine, stock in zip((hidden, weight, bias), ref, strict=True):
        assert_close(mine.grad, stock.grad)


def test_gradients_against_finite_differences():
    hidden, weight, bias, labels = make((9,))

    def ours(hidden, weight, bias):
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias=bias,
            budget=budget_for(8, True, True),
            transform=LogitTransform(0.5, 3.0),
            label_smoothing=0.1,
            z_loss=1e-2,
        )

    assert torch.autograd.gradcheck(ours, (hidden, weight, bias), fast_mode=True)
