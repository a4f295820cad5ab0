"""Adapters on shared experts and dense MLPs, which run in tiles of tokens, and once more in backward."""

import pytest
import torch
from peft import LoHaConfig, get_peft_model
from torch.nn import functional as F

from hf_longmoe import patch_model

DENSE = dict(target_modules=["up_proj", "down_proj"], target_parameters=None)


@pytest.mark.parametrize("how", ["another adapter", "disabled"])
def test_what_is_switched_after_the_forward_does_not_reach_its_backward(build, batch, caps, several, assert_same, how):
    stock, model = (several(build("qwen2_moe"), **DENSE) for _ in range(2))
    patch_model(model, caps())
    inputs, found = {k: v for k, v in batch.items() if k != "labels"}, []
    for m in (stock, model):
        m.get_input_embeddings().weight.requires_grad_(True)
        if how == "disabled":
            with m.disable_adapter():
                logits = m(**inputs).logits
        else:
            logits = m(**inputs).logits
            m.set_adapter("other")
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        m.requires_grad_(True)  # PEFT freezes what is not active
        loss.backward()
        gradients = {name: p.grad for name, p in m.named_parameters() if p.grad is not None and p.grad.any()}
        found.append({"loss": loss.detach()} | {n: g for n, g in gradients.items() if "embed" in n or "lora" in n})
    assert_same(found[1], found[0])
    assert any("default" in name for name in found[0]) == (how != "disabled")
    assert all(entry.schedule is not None for entry in model.longmoe.entries)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ["drawn at random", "a parameter of a linear layer"])
def test_left_alone_and_exact(build, batch, caps, lora, step, assert_same, name, order):
    def adapted(model):
        if name == "drawn at random":
            torch.manual_seed(5)
            options = dict(r=3, target_modules=DENSE["target_modules"], init_weights=False)
            return get_peft_model(model, LoHaConfig(rank_dropout=0.5, **options))
        return lora(model, target_parameters=["up_proj.weight", "mlp.experts.down_proj"])

    stock = adapted(build("qwen2_moe"))
    if order == "before":
        model = patch_model(adapted(build("qwen2_moe")), caps())
    else:
        model = adapted(patch_model(build("qwen2_moe"), caps()))
    torch.manual_seed(7)
    want = step(stock, batch, stock=True)
    torch.manual_seed(7)
    assert_same(step(model, batch), want)
    left = [entry.module for entry in model.longmoe.entries if entry.schedule is None]
    assert len(left) == 3 and not any("experts" in module for module in left)


def test_an_adapter_for_each_sequence_of_a_batch(build, batch, caps, lora):
    def adapted(model):
        model = lora(model, target_modules=r".*layers\.0\.mlp\.(up|down)_proj", target_parameters=None)
        model.add_adapter("other", model.peft_config["default"])
        return model.eval()

    stock, model = adapted(build("qwen2_moe")), patch_model(adapted(build("qwen2_moe")), caps())
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    with torch.no_grad():
        want = stock(**inputs, adapter_names=["default", "other"]).logits
        torch.testing.assert_close(model(**inputs, adapter_names=["default", "other"]).logits, want)
        assert not torch.equal(stock(**inputs).logits, want)
