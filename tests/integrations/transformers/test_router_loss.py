"""The auxiliary loss where it differs between ways of checkpointing, stock or patched."""

import pytest
import torch

from hf_longmoe import patch_model


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
