"""The auxiliary loss where it differs between ways of checkpointing, stock or patched."""

import pytest
import torch

from hf_longmoe import patch_model


def router_gradients(model, batch, coefficient):
    model.router_aux_loss_coef = coefficient
    model.zero_grad()
    output = model(**batch, output_router_logits=True)
    output.loss.backward()
    return output.loss.detach(), torch.stack([layer.mlp.gate.weight.grad for layer in model.model.layers])


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant"])
def test_reentrant_checkpointing_gives_the_auxiliary_loss_no_gradient_as_stock(build, tiny, batch, mode, patched):
    """Its first pass runs without a graph, and the routers' sums (stock: logits) are taken in that one."""
    model = build("mixtral")
    if patched:
        patch_model(model, tiny)
    model.activation_checkpointing_enable({"use_reentrant": mode == "reentrant"})
    loss, without = router_gradients(model, batch, 0.0)
    more, grads = router_gradients(model, batch, 1.0)
    assert more - loss > 1  # it counts in the loss either way
    if mode == "reentrant":
        assert torch.equal(grads, without)
    else:
        assert (grads - without).abs().max() > 1e-3
