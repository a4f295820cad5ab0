"""Under FSDP2 backward fills gathered parameters, others than the model's own: their gradients are `gradients` too."""

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longmoe.integrations.transformers.regions import watch
from hf_longmoe.peaks import StorageProbe


@pytest.fixture
def mesh(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def peaks(mesh):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mixtral", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, vocab_size=256,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    if mesh is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    ids = torch.randint(0, 256, (1, 64))
    for _ in range(2):  # the second step: what FSDP2 makes lazily is there
        with StorageProbe() as probe, watch(model):
            model(input_ids=ids, labels=ids).loss.backward()
    for parameter in model.parameters():
        assert not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks
    return probe.report().components


def test_weight_gradients_are_not_the_dispatch_components(mesh):
    sharded, whole = peaks(mesh), peaks(None)
    assert sharded["dispatch"].peak == whole["dispatch"].peak > 0
    assert sharded["gradients"].peak >= whole["gradients"].peak > 0
