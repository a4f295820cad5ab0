"""The auxiliary loss where it differs between ways of checkpointing, stock or patched."""

import pytest
import torch

from benchmarks.families import small_config
from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig, patch_model
from hf_longmoe.integrations.transformers import planning_shape


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant"])
def test_reentrant_checkpointing_gives_the_auxiliary_loss_no_gradient_as_stock(build, tiny, batch, mode, patched):
    """Its first pass runs without a graph, and the routers' sums (stock: logits) are taken in that one."""
    losses, grads = [], []
    for coefficient in (0.0, 1.0):
        model = build("mixtral", router_aux_loss_coef=coefficient)
        if patched:
            patch_model(model, tiny)
        model.activation_checkpointing_enable({"use_reentrant": mode == "reentrant"})
        losses.append(model(**batch, output_router_logits=True).loss)
        losses[-1].backward()
        grads.append(torch.stack([layer.mlp.gate.weight.grad for layer in model.model.layers]))
    assert losses[1] - losses[0] > 1  # it counts in the loss either way
    if mode == "reentrant":
        assert torch.equal(*grads)
    else:
        assert (grads[1] - grads[0]).abs().max() > 1e-3


@pytest.mark.parametrize("asked", ["by the call", "by the text part's config"])
@pytest.mark.parametrize("family", ["ernie4_5_vl_moe", "qwen3_omni_moe"])
def test_a_multimodal_models_auxiliary_loss_is_streamed_however_it_is_asked_for(family, asked):
    torch.manual_seed(0)
    model = planning_shape.build(small_config(family), torch.float32)
    model.router_aux_loss_coef = 0.5
    ids = torch.randint(10, 1000, (2, 24))
    batch = dict(input_ids=ids, labels=ids)
    if asked == "by the call":
        batch["output_router_logits"] = True
    else:
        model.config.get_text_config().output_router_logits = True

    def step():
        model.zero_grad()
        output = model(**batch)
        output.loss.backward()
        return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    want, grads = step()
    patch_model(model, LongMoEConfig(dispatch=DispatchConfig(budget="128KiB"), vocab=VocabConfig(budget="128KiB")))
    got, streamed = step()
    assert want.router_logits is not None and got.router_logits is None
    torch.testing.assert_close(got.aux_loss.float(), want.aux_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.loss.float(), want.loss, rtol=1e-6, atol=0)
    assert streamed.keys() == grads.keys()
    for name, grad in grads.items():
        assert (streamed[name] - grad).abs().max() <= 2e-5 * grad.abs().max(), name
