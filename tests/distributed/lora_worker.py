"""Run by test_lora_ep.py: LoRA on expert-parallel experts against stock PEFT on one process, fp32."""

import tempfile

import ranks
import torch
from accelerate.state import AcceleratorState
from families_worker import save
from peft import LoraConfig, PeftModel, get_peft_model
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.distributed import DistributedConfig

from hf_longmoe import DispatchConfig, LongMoEConfig, LongMoETrainer, VocabConfig, patch_model
from hf_longmoe.integrations.peft import adapter_state_dict, shard_adapters
from hf_longmoe.integrations.transformers.traffic import Traffic

CAPS = LongMoEConfig(dispatch=DispatchConfig(budget="64KiB", imbalance=1.0), vocab=VocabConfig(budget="16KiB"))
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(model, case, seed=5):
    torch.manual_seed(seed)
    options = dict(target_modules=case["modules"], target_parameters=EXPERTS, modules_to_save=case["saved"])
    return get_peft_model(model, LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, **options))


def run(case):
    rank, size = distributed.get_rank(), distributed.get_world_size()
    path = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(path)
    path = path[0]
    if rank == 0:
        save(case["family"], path)
    distributed.barrier()
    plain = lora(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train(), case)
    sharding = DistributedConfig(
        fsdp_size=size,
        ep_size=case["ep_size"],
        ep_implementation=case["loaded_as"],
        fsdp_plan={"lm_head": "free_full_weight"} if case["ring"] else None,
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=sharding).train()
    # Every rank draws its own factors, which those of the first rank replace; a Trainer does so with whole ones.
    model = lora(model, case, seed=5 + rank * case["sharded"])
    if case["sharded"]:
        shard_adapters(model)
    patch_model(model, CAPS)
    ids = torch.randint(3, 101, (2 * size, 40), generator=torch.Generator().manual_seed(1))
    found = (trained if case["trainer"] else stepped)(model, plain, ids, case, path)
    by_name, shapes = dict(model.named_parameters()), {}
    for name, parameter in by_name.items():
        if "experts" in name and "lora" in name:
            here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            shapes[name] = [here.numel(), parameter.numel()]
    return found | {"shapes": shapes, "schedules": [str(e) for e in model.longmoe.entries]}


def stepped(model, plain, ids, case, path):
    """One step by hand: gradients, the adapter saved and loaded by stock PEFT, and loaded back."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    losses = [plain(input_ids=row[None], labels=row[None]).loss for row in ids[:size]]
    (sum(losses) / size).backward()
    whole = {}
    for parameter in model.parameters():  # what is not divided, as a Trainer does
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            distributed.broadcast(parameter.data, src=0)
    if case["checkpointing"]:
        model.enable_input_require_grads()
        model.base_model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with Traffic(model.base_model.model) as traffic:
        loss = model(input_ids=ids[rank, None], labels=ids[rank, None]).loss
        loss.backward()
    errors = {"loss": abs((loss - losses[rank]) / losses[rank]).item()}
    for name, parameter in model.named_parameters():
        grad, want = parameter.grad, plain.get_parameter(name).grad
        assert (grad is None) == (want is None), name
        if grad is None:
            continue
        if not isinstance(grad, DTensor):
            distributed.all_reduce(grad.div_(size))
        whole[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
        errors[name] = ((whole[name] - want).abs().max() / want.abs().max()).item()
    with torch.no_grad():
        for name in whole:
            parameter, other = model.get_parameter(name), plain.get_parameter(name)
            parameter.sub_(parameter.grad)
            other.sub_(other.grad)
    state = adapter_state_dict(model) if case["sharded"] else None  # else PEFT gathers it, and the base with it
    model.save_pretrained(f"{path}/adapter", state_dict=state, is_main_process=rank == 0)
    distributed.barrier()
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, f"{path}/adapter")
    with torch.no_grad():
        logits, want, here = (m(input_ids=ids).logits for m in (loaded, plain, model))
        for name in whole:
            model.get_parameter(name).mul_(0)
        model.load_adapter(f"{path}/adapter", "default")
        again = model(input_ids=ids).logits
    for name, value in (("loaded by stock PEFT", logits), ("here", here), ("loaded here", again)):
        errors[name] = ((value - want).abs().max() / want.abs().max()).item()
    layers = traffic.layers.values()
    return {"errors": errors, "waves": [x.waves for x in layers], "lent": [x.lent for x in layers]}


def trained(model, plain, ids, case, path):
    """Two steps of a Trainer, clipped, with a checkpoint after each; and two of AdamW by hand."""
    size = distributed.get_world_size()
    AcceleratorState._reset_state(reset_partial_state=True)
    parameters = [p for p in plain.parameters() if p.requires_grad]
    optimizer, norms = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0), []
    for step in range(2):
        optimizer.zero_grad()
        rows = ids[step * size : (step + 1) * size]
        (sum(plain(input_ids=row[None], labels=row[None]).loss for row in rows) / size).backward()
        norms.append(clip_grad_norm_(parameters, 0.1).item())
        optimizer.step()
    options = dict(
        output_dir=f"{path}/run",
        use_cpu=True,
        per_device_train_batch_size=1,
        max_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.1,
        logging_steps=1,
        save_steps=1,
        train_sampling_strategy="sequential",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = LongMoETrainer(model=model, args=TrainingArguments(**options), train_dataset=data)
    trainer.train()
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    errors = {f"norm {step}": abs(a - b) / b for step, (a, b) in enumerate(zip(logged, norms, strict=True))}
    trainer.save_model(f"{path}/adapter")
    distributed.barrier()
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), f"{path}/adapter"
    )
    for name, parameter in plain.named_parameters():
        if "lora_" in name:
            other = loaded.get_parameter(name)
            errors[name] = ((other - parameter).abs().max() / parameter.abs().max()).item()
    before = adapter_state_dict(model)
    again = LongMoETrainer(model=model, args=TrainingArguments(**options), train_dataset=data)
    again.train(resume_from_checkpoint=f"{path}/run/checkpoint-1")
    for name, value in adapter_state_dict(model).items():
        errors[f"resumed {name}"] = (value - before[name]).abs().max().item()
    return {"errors": errors}


if __name__ == "__main__":
    ranks.main(run)
