"""Run by test_composed.py: `Trainer.train` of one stock process, and `LongMoETrainer` with all on, over ranks."""

import os
import tempfile

import ranks
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import ParallelismConfig
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

from hf_longmoe import (
    BoundariesConfig,
    DispatchConfig,
    LongMoEConfig,
    LongMoEPlugin,
    LongMoETrainer,
    OptimizerConfig,
    VocabConfig,
    patch_model,
)
from hf_longmoe.schedules.host import FakeEngine

VOCABULARY, LAYERS = 101, 3
SIZES = dict(hidden_size=32, intermediate_size=24, num_attention_heads=4, num_key_value_heads=4, num_local_experts=4)
CAPS = {
    "dispatch": DispatchConfig(budget="256KiB"),
    "vocab": VocabConfig(budget="64KiB"),
    "boundaries": BoundariesConfig(),
    "optimizer": OptimizerConfig(bucket="16KiB", update_on="both"),
}


class Recorded:
    """The loss of each step: over the step's micro-batches the sum, over ranks the mean."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        mean = self.accelerator.gather(loss.detach().double()).mean().item()
        if self.state.global_step == len(self.steps):
            self.steps.append(0.0)
        self.steps[-1] += mean
        return loss


class Stock(Recorded, Trainer):
    pass


class Ours(Recorded, LongMoETrainer):
    pass


class FirstGradients(TrainerCallback):
    """Those of the first step, clipped, by name; whole ones."""

    def __init__(self):
        self.found = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            for name, param in model.named_parameters():
                grad = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
                self.found[name] = grad.float().flatten().tolist()


def data(samples, lengths, masked=True):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(samples):
        ids = torch.randint(3, VOCABULARY, (lengths[number % len(lengths)],), generator=generator)
        labels = ids.clone()
        labels[: number % 3 * 5 * masked] = -100  # of a rank's part, perhaps all
        rows.append({"input_ids": ids, "labels": labels})
    return rows


class Streamed(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def build(case, folder):
    """The same model in every launch, stock and whole or sharded over all ranks."""
    if distributed.get_rank() == 0:
        torch.manual_seed(0)
        options = {"output_router_logits": True, "router_aux_loss_coef": case["aux"]} if case.get("aux") else {}
        config = AutoConfig.for_model(
            "mixtral", vocab_size=VOCABULARY, num_hidden_layers=LAYERS, use_cache=False, **SIZES, **options
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    distributed.barrier()
    world, on = distributed.get_world_size(), case["on"]
    options = {"dtype": getattr(torch, case.get("dtype", "float32"))}
    if case["trainer"] == "ours" and case.get("sharded", True):
        options["distributed_config"] = DistributedConfig(
            fsdp_size=world,
            ep_size=case.get("ep", world),
            ep_implementation="pipelined_llep" if "dispatch" in on else "all_to_all",
            fsdp_plan={"lm_head": "free_full_weight"} if "vocab" in on else None,
        )
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def arguments(case, folder):
    world, cp = distributed.get_world_size(), case.get("cp", 1)
    options = {}
    if cp > 1 and not case.get("launch keys"):
        options["parallelism_config"] = ParallelismConfig(cp_size=cp, dp_shard_size=world // cp)
    return TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=case["accumulation"],
        max_steps=case["steps"],
        learning_rate=1e-2,
        warmup_steps=2,
        lr_scheduler_type="inverse_sqrt",
        max_grad_norm=0.5,
        weight_decay=0.1,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        activation_checkpointing="boundaries" in case["on"],
        **options,
    )


def run(case):
    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    rank, world, cp, on = distributed.get_rank(), distributed.get_world_size(), case.get("cp", 1), case["on"]
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(folder)
    model = build(case, folder[0])
    caps = LongMoEConfig(**{part: caps if part in on else None for part, caps in CAPS.items()})
    if "dispatch" in on or "vocab" in on:
        patch_model(model, caps)
    keys = {"USE_PARALLELISM_CONFIG": "true", "CP_SIZE": cp, "DP_SHARD_SIZE": world // cp}
    names = {key: ("ACCELERATE_" if key.startswith("USE") else "PARALLELISM_CONFIG_") + key for key in keys}
    if case.get("launch keys"):
        os.environ.update({names[key]: str(value) for key, value in keys.items()})
    rows = data(case["samples"], (20, 23, 17, 22))
    first, evaluated = FirstGradients(), data(6, (18,), masked=False)
    evaluated.append(evaluated[0])  # as a dataloader over ranks fills up its last batch
    try:
        trainer = (Ours if case["trainer"] == "ours" else Stock)(
            model=model,
            args=arguments(case, folder[0]),
            train_dataset=Streamed(rows) if case.get("streamed") else rows,
            eval_dataset=evaluated,
            callbacks=[first],
        )
        trainer.steps = []
        plugin = None
        if case["trainer"] == "ours":
            engine = FakeEngine(seed=rank)
            plugin = LongMoEPlugin(caps, engine=engine).install(trainer.accelerator)
        trainer.train()
        found = {"losses": trainer.steps}
        if case.get("evaluated"):
            found["evaluation"] = trainer.evaluate()["eval_loss"]
    finally:
        for name in names.values():
            os.environ.pop(name, None)
    found["gradients"] = first.found if rank == 0 and case.get("gradients") else {}
    if plugin is not None:
        if "boundaries" in on:
            found["offloaded"] = plugin._models[0].offload.offloaded
        found["streamed"] = [type(o.optimizer).__name__ for o in trainer.accelerator._optimizers]
        found["shared"] = "longmoe_sequences" in vars(model)
        plugin.remove()
        found["left"] = [engine.host_bytes, engine.device_bytes, "longmoe_sequences" in vars(model)]
        found["implementation"] = model.config._attn_implementation
    if "longmoe" in vars(model):
        found["schedules"] = [str(entry) for entry in model.longmoe.entries]
    return found


if __name__ == "__main__":
    ranks.main(run)
