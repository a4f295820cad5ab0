"""LoRA on the LM head: no logits in training, and the loss and gradients of stock PEFT."""

import pytest
import torch
from torch.nn import functional as F

from hf_longmoe import patch_model, unpatch_model

HEAD = dict(target_modules=["q_proj", "lm_head"], target_parameters=None)


def test_adapters_of_a_head_are_switched(build, batch, caps, several, step, assert_same):
    stock, model = (several(build("mixtral"), **HEAD) for _ in range(2))
    patch_model(model, caps())
    losses = []
    for active in ("default", "other", ["default", "other"]):
        for m in (stock, model):
            m.base_model.set_adapter(active)
        got = step(model, batch)
        assert_same(got, step(stock, batch, stock=True))
        losses.append(got["loss"])
    assert len({round(loss.item(), 3) for loss in losses}) == 3
    with model.disable_adapter(), stock.disable_adapter(), torch.no_grad():
        assert abs(model(**batch).loss - stock(**batch).loss) < 1e-6
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, stock(**inputs).logits)
    assert not any("forward" in vars(m) for m in unpatch_model(model).modules())


@pytest.mark.parametrize("bias", [True, False])
def test_no_logits_are_formed(build, batch, caps, lora, step, assert_same, monkeypatch, bias):
    """With a bias of the factor B too, which is added to the head's own."""

    def adapted():
        return lora(build("ernie4_5_moe", tie_word_embeddings=False), **HEAD, lora_bias=bias)

    stock, model = adapted(), patch_model(adapted(), caps())
    assert model.get_output_embeddings().bias is not None
    want = step(stock, batch, stock=True)
    shapes, linear = [], F.linear

    def seen(input, weight, bias=None):
        shapes.append(weight.shape[0])
        return linear(input, weight, bias)

    monkeypatch.setattr(F, "linear", seen)
    assert_same(step(model, batch), want)
    assert shapes and 101 not in shapes
    assert any(entry.component == "vocab" and "LoRA (r=3)" in entry.note for entry in model.longmoe.entries)


def test_a_tied_head_that_is_copied_after_the_patch_is_taken_over(build, batch, caps, lora, step, assert_same):
    """PEFT makes it anew for the embeddings' copy."""

    def small():
        return build("mixtral", torch.float32, tie_word_embeddings=True)

    options = dict(target_modules=["q_proj"], target_parameters=None, modules_to_save=["embed_tokens"])
    stock, model = (lora(m, ensure_weight_tying=True, **options) for m in (small(), patch_model(small(), caps())))
    want = step(stock, batch)
    for schedule in (None, "tiles"):
        assert_same(step(model, batch), want, tolerance=2e-5)
        assert [e.schedule for e in model.longmoe.entries if e.component == "vocab"] == [schedule]
        patch_model(model, caps())


def test_a_second_adapter_is_taken_over_by_another_patch_and_the_report_says_so(
    build, batch, caps, lora, step, assert_same
):
    model = lora(patch_model(build("mixtral"), caps()), **HEAD)
    step(model, batch)
    model, stock = lora(model.unload(), **HEAD), lora(build("mixtral"), **HEAD)
    step(model, batch)

    def note():
        return next(entry.note for entry in model.longmoe.entries if entry.component == "vocab")

    assert "applies 'add' to its logits" in note()
    patch_model(model, caps())
    assert "LoRA (r=3)" in note()
    assert_same(step(model, batch), step(stock, batch, stock=True))
    assert "LoRA (r=3)" in note()
