"""DDP copies every output of a step unless checkpointing is on: the placeholder of the logits has to survive that."""

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longmoe.integrations.transformers import patch_model

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.fixture
def group_of_one(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("options", [dict(find_unused_parameters=True), dict(static_graph=True), dict()], ids=str)
def test_outputs_survive_ddp(group_of_one, options):
    config = AutoConfig.for_model("mixtral", num_key_value_heads=1, num_local_experts=4, **SIZES)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.randint(0, 64, (1, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    stock = [p.grad.clone() for p in model.parameters()]
    ddp = DistributedDataParallel(patch_model(model), **options)
    for _ in range(2):
        model.zero_grad()
        ddp(input_ids=ids, labels=ids).loss.backward()
        for p, want in zip(model.parameters(), stock, strict=True):
            torch.testing.assert_close(p.grad, want, rtol=1e-4, atol=1e-6)
