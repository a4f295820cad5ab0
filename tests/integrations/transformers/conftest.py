"""What these tests share: small caps, gradients of a call, and how to compare them."""

import dataclasses

import pytest
from torch import nn
from torch.nn import functional as F

from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig
from hf_longmoe.integrations.transformers import counting, planning


@pytest.fixture
def tiny():
    """A few rows a wave, a few tokens a tile."""
    return LongMoEConfig(dispatch=DispatchConfig(budget="16KiB"), vocab=VocabConfig(budget="16KiB"))


@pytest.fixture
def loss_of():
    """`loss_of(logits, labels)`: the stock loss in the dtype of the logits (`ForCausalLMLoss`: float32)."""

    def loss_of(logits, labels):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return loss_of


@pytest.fixture
def gradients():
    """`gradients(model, loss)`: every gradient by name."""

    def gradients(model, loss):
        model.zero_grad()
        loss.backward()
        return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}

    return gradients


@pytest.fixture
def assert_same():
    """`assert_same(got, want, tolerance=1e-12)`: two dicts of tensors, relative to the largest element of each."""

    def assert_same(got, want, tolerance=1e-12):
        assert got.keys() == want.keys() and want
        for name in want:
            difference, scale = (got[name] - want[name]).abs().max(), want[name].abs().max()
            assert difference <= tolerance * scale, f"{name}: {difference / scale:.1e}"

    return assert_same


@pytest.fixture
def formed(monkeypatch):
    """A list of the shapes of all logits formed by `torch.nn.functional.linear` with the LM head's 101 rows."""
    shapes, stock = [], F.linear

    def linear(input, weight, bias=None):
        if weight.shape[0] == 101:
            shapes.append((*input.shape[:-1], 101))
        return stock(input, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", linear)
    return shapes


@pytest.fixture(scope="module")
def short_counts():
    """A patched model is counted in fewer waves and tiles than usual. The stock model's lengths are the usual."""
    with pytest.MonkeyPatch.context() as patch:
        fewer = dataclasses.replace(counting._USUAL, kept=(1024, 4096))
        patch.setattr(planning, "lengths_for", lambda config, layout: fewer)
        patch.setattr(counting, "_ROWS", 512)
        yield
