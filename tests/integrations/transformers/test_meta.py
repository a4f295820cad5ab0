"""A model whose weights are not there yet (made under `torch.device("meta")`) can be patched; they come later."""

import torch
from transformers import AutoModelForCausalLM

from hf_longmoe import patch_model


def test_a_meta_model_is_patched_and_trains_once_its_weights_are_there(
    build, family, batch, tiny, gradients, assert_same
):
    ready = build(family)
    want = gradients(ready, ready(**batch).loss)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(ready.config, dtype=torch.float64).train()
    patch_model(model, tiny)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    schedules = {entry.schedule for entry in model.longmoe.entries}
    assert "tiles" in schedules and (family == "llama" or "expert-major waves" in schedules)

    model.to_empty(device="cpu")
    model.load_state_dict(ready.state_dict())
    for here, there in zip(model.buffers(), ready.buffers(), strict=True):  # those that no checkpoint holds
        here.copy_(there)
    model.tie_weights()
    assert_same(gradients(model, model(**batch).loss), want, tolerance=1e-6)  # the stock loss is float32
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model(**batch).loss < ready(**batch).loss
