"""Run by test_refusals_ep.py: what a load, a patch or a first step says to input that cannot work."""

import os
import tempfile

import ranks
import torch
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_longmoe import DispatchConfig, LongMoEConfig, patch_model


def run(case):
    rank, size = distributed.get_rank(), distributed.get_world_size()
    path = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(path)
    if rank == 0:
        config = AutoConfig.for_model(
            "mixtral",
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=case.get("experts", 4),
            vocab_size=64,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(path[0])
    distributed.barrier()
    sharding = {"fsdp_size": size, "ep_size": size, "ep_implementation": "pipelined_llep", **case.get("sharding", {})}
    for name, value in case.get("environment", {}).items():
        os.environ[name] = value
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path[0],
            dtype=getattr(torch, case.get("dtype", "float32")),
            distributed_config=DistributedConfig(**sharding),
        ).train()
        if "budget" in case:
            before = {name: vars(m).get("forward") for name, m in model.named_modules()}
            try:
                budget = case["budget"][rank] if isinstance(case["budget"], list) else case["budget"]
                patch_model(model, LongMoEConfig(dispatch=DispatchConfig(budget=budget)))
            except ValueError:
                assert before == {name: vars(m).get("forward") for name, m in model.named_modules()}
                raise
        torch.manual_seed(rank if case.get("other batches") else 0)
        ids = torch.randint(0, 64, (1, 40))
        model(input_ids=ids, labels=ids).loss.backward()
    except ValueError as error:
        return str(error)
    finally:
        for name in case.get("environment", {}):
            del os.environ[name]
    return None


if __name__ == "__main__":
    ranks.main(run)
