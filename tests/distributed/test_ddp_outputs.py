"""DDP copies every output of a step unless checkpointing is on: the placeholder of the logits has to survive that."""

import subprocess
import sys

CODE = """
import sys, torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
from transformers import AutoConfig, AutoModelForCausalLM
from hf_longmoe import patch_model
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
config = AutoConfig.for_model("mixtral", num_key_value_heads=1, num_local_experts=4, **sizes)
for options in (dict(find_unused_parameters=True), dict(static_graph=True), dict()):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.randint(0, 64, (1, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    stock = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    ddp = torch.nn.parallel.DistributedDataParallel(patch_model(model), **options)
    for _ in range(2):
        model.zero_grad()
        ddp(input_ids=ids, labels=ids).loss.backward()
        for p, want in zip(model.parameters(), stock, strict=True):
            torch.testing.assert_close(p.grad, want, rtol=1e-4, atol=1e-6)
"""


def test_outputs_survive_ddp(tmp_path):
    subprocess.run([sys.executable, "-c", CODE, tmp_path / "store"], check=True, timeout=120)
