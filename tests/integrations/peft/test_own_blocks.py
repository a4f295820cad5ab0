"""LoRA on experts outside of the experts interface: left alone, and so the loss and gradients of stock PEFT."""

import pytest
import torch

from benchmarks.every_family import caps_of, model_of
from hf_longmoe import patch_model, unpatch_model
from hf_longmoe.schedules.dispatch import LocalDispatch

TARGETS = {
    "llama4": ["experts.gate_up_proj", "experts.down_proj"],
    "longcat_flash": ["experts.gate_up_proj"],
    "step3p7": ["experts.gate_up_proj", "experts.down_proj"],
    "jetmoe": ["mlp.input_linear.weight"],
}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("family", TARGETS)
def test_exact_and_reported(batch, lora, step, assert_same, family, order):
    options = dict(target_parameters=TARGETS[family])
    stock = lora(model_of(family), **options)
    want = step(stock, batch, stock=True)
    if order == "before":
        model = patch_model(lora(model_of(family), **options), caps_of(family))
    else:
        model = lora(patch_model(model_of(family), caps_of(family)), **options)
    assert_same(step(model, batch), want)
    left = [entry for entry in model.longmoe.entries if "an adapter is on its" in entry.note]
    assert left and all(entry.schedule is None and entry.component == "dispatch" for entry in left)
    with model.disable_adapter(), stock.disable_adapter(), torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(stock(**batch).loss.item(), rel=1e-6)
    bare = model.unload()
    assert bare(**batch).loss.item() == pytest.approx(unpatch_model(bare)(**batch).loss.item(), rel=1e-6)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(("family", "saved"), [("llama4", "experts"), ("jetmoe", "mlp.input_linear")])
def test_saved_whole_they_run_in_waves(batch, lora, step, assert_same, monkeypatch, family, saved, order):
    options = dict(target_modules=["q_proj"], target_parameters=None, modules_to_save=[saved])
    if family == "jetmoe":
        options["target_modules"] = ["kv_proj"]
    want = step(lora(model_of(family), **options), batch, stock=True)
    if order == "before":
        model = patch_model(lora(model_of(family), **options), caps_of(family))
    else:
        model = lora(patch_model(model_of(family), caps_of(family)), **options)
    runs, call = [], LocalDispatch.__call__
    monkeypatch.setattr(LocalDispatch, "__call__", lambda self, *args: runs.append(1) or call(self, *args))
    assert_same(step(model, batch), want)
    assert runs and any("modules_to_save" in name for name in want)
