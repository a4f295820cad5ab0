"""Run by test_families_ep.py: a family under FSDP2 and expert parallelism against one process, fp32."""

import importlib.util
import tempfile
from pathlib import Path

import ranks
import torch
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_longmoe import DispatchConfig, LongMoEConfig, patch_model
from hf_longmoe.integrations.transformers.traffic import Traffic

spec = importlib.util.spec_from_file_location("families", Path(__file__).parents[1] / "conftest.py")
families = importlib.util.module_from_spec(spec)
spec.loader.exec_module(families)


def save(name, path):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**families._SMALL, **families.MODELS[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5 / parameter.shape[-1] ** 0.5 if "embed" not in parameter_name else 1.0)
    model.save_pretrained(path)


def run(case):
    rank, size = distributed.get_rank(), distributed.get_world_size()
    path = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(path)
    path = path[0]
    if rank == 0:
        save(case["family"], path)
    distributed.barrier()
    ids = torch.randint(0, 101, (size, 40), generator=torch.Generator().manual_seed(1))
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    losses = [reference(input_ids=row[None], labels=row[None]).loss for row in ids]
    for _ in range(case["steps"]):
        (sum(losses) / size).backward(retain_graph=True)
    sharding = DistributedConfig(fsdp_size=size, ep_size=case["ep_size"], ep_implementation=case["loaded_as"])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=sharding).train()
    if case["budget"]:
        config = DispatchConfig(budget=case["budget"], imbalance=1.0, kernel=case["kernel"])
        patch_model(model, LongMoEConfig(dispatch=config))
    if case["checkpointing"] != "off":
        how = {"use_reentrant": case["checkpointing"] == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    with Traffic(model) as traffic:
        for _ in range(case["steps"]):
            loss = model(input_ids=ids[rank, None], labels=ids[rank, None]).loss
            loss.backward()
    errors = {"loss": abs((loss - losses[rank]) / losses[rank]).item()}
    found = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        wanted, grad = parameter.grad, found[name].grad
        assert (wanted is None) == (grad is None), name
        grad = None if grad is None else grad.full_tensor()
        if wanted is not None and wanted.any():
            errors[name] = ((grad - wanted).abs().max() / wanted.abs().max()).item()
        elif grad is not None:
            assert not grad.any(), name
    return {
        "errors": errors,
        "schedules": [str(e) for e in model.longmoe.entries] if case["budget"] else [],
        "waves": [layer.waves for layer in traffic.layers.values()],
        "lent": [layer.lent for layer in traffic.layers.values()],
    }


if __name__ == "__main__":
    ranks.main(run)
