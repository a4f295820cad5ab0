"""LoRA on attention, on shared experts, on experts, on the head; put on before the patch or after it: always exact."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig, patch_model, unpatch_model


def lora(model, **kwargs):
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, **kwargs))


SHARED = ["up_proj", "down_proj"]  # the shared experts' linear layers, and a dense layer's
ADAPTERS = {
    "attention": (dict(target_modules=["q_proj", "v_proj", "o_proj"]), set()),
    "a shared expert": (dict(target_modules=SHARED), set()),
    "a shared expert, with dropout": (dict(target_modules=SHARED, lora_dropout=0.5), {"shared_expert", "mlp"}),
    "experts": (dict(target_modules=["o_proj"], target_parameters=["mlp.experts.gate_up_proj"]), set()),
    "both of the experts": (
        dict(target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        set(),
    ),
    "the head": (dict(target_modules=["q_proj", "lm_head"]), set()),
    "the head, with dropout": (dict(target_modules=["q_proj", "lm_head"], lora_dropout=0.3), set()),
    "the head, DoRA": (dict(target_modules=["q_proj", "lm_head"], use_dora=True), {"lm_head"}),
    "the head, saved whole": (dict(target_modules=["q_proj"], modules_to_save=["lm_head"]), set()),
}


@pytest.mark.parametrize("mode", ["plain", "non-reentrant"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_lora(build, batch, gradients, assert_same, loss_of, name, order, mode):
    """Put on before the patch or after it: exact, bounded where it can be, and reported where it cannot."""
    family = "qwen2_moe" if "shared" in name else "mixtral"
    options, left_alone = ADAPTERS[name]
    caps = LongMoEConfig(dispatch=DispatchConfig(budget="24KiB"), vocab=VocabConfig(budget="16KiB"))
    stock = lora(build(family), **options)
    inputs = {k: v for k, v in batch.items() if k != "labels"}

    def step(model, loss):
        return gradients(model, loss(model))

    torch.manual_seed(7)
    want = step(stock, lambda model: loss_of(model(**inputs).logits, batch["labels"]))
    model = build(family)
    if order == "before":
        model = patch_model(lora(model, **options), caps)
    else:
        model = lora(patch_model(model, caps), **options)
    assert model.state_dict().keys() == stock.state_dict().keys()
    if mode != "plain":
        model.enable_input_require_grads()
        model.base_model.model.activation_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(7)
    got = step(model, lambda model: model(**batch).loss)
    stock_loss = "DoRA" in name  # float32
    assert_same(got, want, tolerance=2e-5 if stock_loss else 1e-12)
    left = {entry.module.replace(".base_layer", "") for entry in model.longmoe.entries if entry.schedule is None}
    assert {module.rpartition(".")[2] for module in left} == left_alone


def test_an_adapter_comes_off_a_patched_model(build, tiny, batch):
    model = build("mixtral")
    want = model(**batch).loss
    adapted = lora(patch_model(model, tiny), target_modules=["q_proj", "lm_head"])
    assert abs(adapted(**batch).loss - want) > 1e-3
    bare = adapted.unload()
    assert bare is model and "longmoe" in vars(model)
    torch.testing.assert_close(bare(**batch).loss.float(), want, rtol=1e-6, atol=0)
    assert torch.equal(unpatch_model(model)(**batch).loss, want)


def test_an_adapter_of_a_saved_head_leaves_no_trace(build, tiny, batch):
    """PEFT copies the head: the copy is restored like the original."""
    adapted = lora(patch_model(build("mixtral"), tiny), target_modules=["q_proj"], modules_to_save=["lm_head"])
    unpatch_model(adapted)
    assert not any("forward" in vars(m) or "longmoe_head" in vars(m) for m in adapted.modules())
    assert type(adapted(**batch).logits) is torch.Tensor


def test_a_ring_that_is_forced_on_an_adapted_head_is_refused(build):
    forced = LongMoEConfig(vocab=VocabConfig(budget="16KiB", schedule="ring"))
    for options in (
        dict(target_modules=["q_proj", "lm_head"]),
        dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    ):
        with pytest.raises(ValueError, match='vocab.schedule="ring": .*lm_head.* an adapter wraps it'):
            patch_model(lora(build("mixtral"), **options), forced)
    with pytest.raises(ValueError, match="its weight is not divided over ranks"):
        patch_model(lora(build("mixtral"), target_modules=["q_proj"]), forced)
