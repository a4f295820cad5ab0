"""Routers that are trained whole (`modules_to_save`): their auxiliary loss, whatever PEFT has copied, and when."""

import pytest
import torch

from hf_longmoe import patch_model, unpatch_model

SAVED = {"all": ["mlp.gate"], "one": ["layers.0.mlp.gate"], "a whole block": ["layers.1.mlp"]}


@pytest.mark.parametrize("order", ["before", "after", "after a step"])
@pytest.mark.parametrize("name", SAVED)
def test_the_auxiliary_loss_is_that_of_stock(build, batch, caps, lora, step, assert_same, name, order):
    def small():
        return build("mixtral", torch.float32, output_router_logits=True, router_aux_loss_coef=0.5)

    options = dict(target_modules=["q_proj"], target_parameters=None, modules_to_save=SAVED[name])
    stock = lora(small(), **options)
    if order == "before":
        model = patch_model(lora(small(), **options), caps())
    else:
        model = patch_model(small(), caps())
        if order == "after a step":
            step(model, batch)
        model = lora(model, **options)
    want = step(stock, batch)
    assert_same(step(model, batch), want, tolerance=2e-5)
    assert any("gate.modules_to_save" in n or "mlp.modules_to_save" in n for n in want)
    unpatch_model(model)
    hooks = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert not any(hook.__module__.startswith("hf_longmoe") for hook in hooks)
