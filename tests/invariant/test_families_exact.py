"""Loss and every gradient of every supported family equal the stock path's, in float64."""

import pytest
import torch
from torch.nn import functional as F

from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig, patch_model, unpatch_model

TINY = LongMoEConfig(dispatch=DispatchConfig(budget="16KiB"), vocab=VocabConfig(budget="16KiB"))  # a few rows a wave


def checkpointing(model, mode):
    if mode != "plain":
        model.activation_checkpointing_enable({"use_reentrant": mode == "reentrant"})


def stock(model, batch):
    """`ForCausalLMLoss` casts logits to float32: the reference takes the cross-entropy of the float64 logits."""
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    logits = model(**inputs).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    return loss, gradients(model, loss)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def assert_same(got, want, tolerance=1e-12):
    assert got.keys() == want.keys()
    for name in want:
        difference = (got[name] - want[name]).abs().max()
        assert difference <= tolerance * want[name].abs().max(), f"{name}: {difference / want[name].abs().max():.1e}"


@pytest.mark.parametrize("mode", ["plain", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("budget", ["tiny", "default"])
def test_exact(build, family, batch, mode, budget):
    model = build(family)
    loss, grads = stock(model, batch)
    assert all(g.any() for g in grads.values())
    patch_model(model, TINY if budget == "tiny" else None)
    checkpointing(model, mode)
    output = model(**batch)
    assert (output.loss - loss).abs() <= 1e-12 * loss.abs()
    assert_same(gradients(model, output.loss), grads)


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_exact_through_the_models_own_kernel(build, family, batch, experts):
    if family == "llama":
        pytest.skip("no experts")
    model = build(family, experts=experts)
    loss, grads = stock(model, batch)
    patch_model(
        model,
        LongMoEConfig(dispatch=DispatchConfig(budget="64KiB" if experts == "eager" else "128KiB", kernel="model")),
    )
    checkpointing(model, "non-reentrant")
    output = model(**batch)
    assert (output.loss - loss).abs() <= 1e-12 * loss.abs()
    assert_same(gradients(model, output.loss), grads)


def test_grouped_mm_in_float32(build, family, batch):
    """`grouped_mm` refuses float64 on some devices, so this one is held to float32 rounding."""
    if family == "llama":
        pytest.skip("no experts")
    model = build(family, dtype=torch.float32, experts="grouped_mm")
    loss, grads = stock(model, batch)
    for kernel in ("auto", "model"):
        patch_model(model, LongMoEConfig(dispatch=DispatchConfig(budget="64KiB", kernel=kernel)))
        output = model(**batch)
        assert (output.loss - loss).abs() <= 1e-6 * loss.abs()
        assert_same(gradients(model, output.loss), grads, tolerance=2e-5)
        unpatch_model(model)


@pytest.mark.parametrize("mode", ["plain", "non-reentrant"])
def test_router_loss_is_streamed_exactly(build, family, batch, mode):
    """The stock loss is float32 throughout: equal to its rounding, with and without padding."""
    batch["attention_mask"][1, 15:] = 0
    model = build(family, dtype=torch.float32)
    if not hasattr(model, "router_aux_loss_coef"):
        pytest.skip("no auxiliary loss")
    model.router_aux_loss_coef = 0.5
    want = model(**batch, output_router_logits=True)
    grads = gradients(model, want.loss)
    patch_model(model, TINY)
    checkpointing(model, mode)
    got = model(**batch, output_router_logits=True)
    assert got.router_logits is None and want.router_logits is not None
    assert list(got.keys()) == [k for k in want.keys() if k != "router_logits"]
    torch.testing.assert_close(got.aux_loss, want.aux_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
    assert_same(gradients(model, got.loss), grads, tolerance=2e-5)


def test_unpatching_restores_every_bit(build, family, batch):
    model = build(family)
    before = {id(m): dict(vars(m)) for m in model.modules()}
    want = model(**batch)
    grads = gradients(model, want.loss)
    patch_model(model, TINY)
    unpatch_model(model)
    for module in model.modules():
        assert vars(module).keys() == before[id(module)].keys()
        assert not module._forward_hooks
    got = model(**batch)
    assert torch.equal(got.logits, want.logits) and torch.equal(got.loss, want.loss)
    assert all(torch.equal(g, grads[n]) for n, g in gradients(model, got.loss).items())
