"""Run by test_lora_ep.py: LoRA on expert-parallel experts against stock PEFT on one process, fp32."""

import tempfile

import ranks
import torch
from families_worker import save
from peft import LoraConfig, PeftModel, get_peft_model
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig, patch_model
from hf_longmoe.integrations.peft import adapter_state_dict, shard_adapters
from hf_longmoe.integrations.transformers.traffic import Traffic


def lora(model, case):
    torch.manual_seed(5)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    options = dict(target_modules=case["modules"], target_parameters=names)
    return get_peft_model(model, LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, **options))


def run(case):
    rank, size = distributed.get_rank(), distributed.get_world_size()
    path = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(path)
    path = path[0]
    if rank == 0:
        save(case["family"], path)
    distributed.barrier()
    ids = torch.randint(0, 101, (size, 40), generator=torch.Generator().manual_seed(1))
    reference = lora(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train(), case)
    losses = [reference(input_ids=row[None], labels=row[None]).loss for row in ids]
    (sum(losses) / size).backward()

    sharding = DistributedConfig(fsdp_size=size, ep_size=case["ep_size"], ep_implementation="pipelined_llep")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=sharding).train()
    model = lora(model, case)
    if case["sharded"]:
        shard_adapters(model)
    config = DispatchConfig(budget=case["budget"], imbalance=1.0)
    patch_model(model, LongMoEConfig(dispatch=config, vocab=VocabConfig(budget="16KiB")))
    if case["checkpointing"]:
        model.enable_input_require_grads()
        model.base_model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with Traffic(model.base_model.model) as traffic:
        loss = model(input_ids=ids[rank, None], labels=ids[rank, None]).loss
        loss.backward()
    found, errors = dict(model.named_parameters()), {"loss": abs((loss - losses[rank]) / losses[rank]).item()}
    for name, parameter in reference.named_parameters():
        grad = found[name].grad
        assert (parameter.grad is None) == (grad is None), name
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            whole = grad.full_tensor()
        else:  # as a Trainer does with what FSDP2 does not hold
            distributed.all_reduce(grad, op=distributed.ReduceOp.SUM)
            whole = grad / size
        errors[name] = ((whole - parameter.grad).abs().max() / parameter.grad.abs().max()).item()
    divided = {
        n: (tuple(p.to_local().shape), tuple(p.shape))
        for n, p in found.items()
        if "experts" in n and "lora" in n and isinstance(p, DTensor)
    }

    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter, other in zip(trained, [p for p in reference.parameters() if p.requires_grad], strict=True):
            parameter.add_(parameter.grad, alpha=-0.5 if isinstance(parameter, DTensor) else -0.5 / size)
            other.add_(other.grad, alpha=-0.5)
    state = adapter_state_dict(model) if case["sharded"] else None  # else PEFT gathers it, and the base with it
    model.save_pretrained(f"{path}/adapter", state_dict=state, is_main_process=rank == 0)
    distributed.barrier()
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), f"{path}/adapter"
    )
    with torch.no_grad():
        logits, want, stepped = (
            model(input_ids=ids).logits,
            plain(input_ids=ids).logits,
            reference(input_ids=ids).logits,
        )
    reloaded = ((logits - want).abs().max() / want.abs().max()).item()
    after = ((want - stepped).abs().max() / want.abs().max()).item()
    with torch.no_grad():  # a plain adapter goes into the divided factors
        for parameter in trained:
            parameter.mul_(0)
        model.load_adapter(f"{path}/adapter", "default")
        again = ((model(input_ids=ids).logits - want).abs().max() / want.abs().max()).item()
    return {
        "errors": errors,
        "divided": divided,
        "reloaded": reloaded,
        "after a step": after,
        "loaded": again,
        "schedules": [str(e) for e in model.longmoe.entries],
        "waves": [layer.waves for layer in traffic.layers.values()],
        "lent": [layer.lent for layer in traffic.layers.values()],
    }


if __name__ == "__main__":
    ranks.main(run)
