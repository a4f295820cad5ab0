"""
LoRA on the experts of a MoE model, in stock PEFT and in the schedules: the same losses, at a fraction of the peak.

    python examples/lora_experts.py
    accelerate launch --config_file accelerate_configs/cpu_2proc_ep.yaml examples/lora_experts.py --expert_parallel
    python examples/lora_experts.py --model_name_or_path Qwen/Qwen3-30B-A3B --seq_len 8192

Adapts the stacked expert weights, the attention and the LM head, prints losses and peaks of both runs, and loads the
saved adapter into a plain model with stock PEFT. With `--expert_parallel`, which stock PEFT has no LoRA on experts
for, each process holds the factors of its own experts. Needs no network: the default model is a small Qwen3-MoE made
from its config, on random tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig

from hf_longmoe import (
    ComponentPeakCallback,
    DispatchConfig,
    LongMoEConfig,
    LongMoETrainer,
    VocabConfig,
    patch_model,
)
from hf_longmoe.integrations.peft import shard_adapters
from hf_longmoe.sizes import format_bytes


@dataclass
class LoraArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Hub id or folder. Default: a small one."})
    seq_len: int = field(default=1024, metadata={"help": "Tokens in a sequence."})
    steps: int = field(default=3, metadata={"help": "Optimizer steps."})
    r: int = field(default=8, metadata={"help": "LoRA's rank."})
    dispatch_budget: str = field(default="2MiB", metadata={"help": "Bytes in flight in one expert block."})
    vocab_budget: str = field(default="2MiB", metadata={"help": "Bytes of logits and of all made from them."})
    output_dir: str = field(default="runs/lora", metadata={"help": "Base model, adapter, peaks."})
    expert_parallel: bool = field(default=False, metadata={"help": "Divide the experts over the processes."})


def main() -> None:
    (arguments,) = HfArgumentParser(LoraArguments).parse_args_into_dataclasses()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    training = TrainingArguments(
        output_dir=arguments.output_dir,
        max_steps=arguments.steps,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        activation_checkpointing=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=torch.accelerator.device_count() < processes,
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    base = arguments.model_name_or_path or save_base(arguments, training)
    caps = LongMoEConfig(
        dispatch=DispatchConfig(budget=arguments.dispatch_budget), vocab=VocabConfig(budget=arguments.vocab_budget)
    )
    runs = {}
    if not arguments.expert_parallel:
        runs["stock PEFT"] = train(adapted(arguments, base), arguments, training)
    model = adapted(arguments, base)
    if arguments.expert_parallel:
        shard_adapters(model)  # before an optimizer is made; without it every process holds the factors of all experts
    patch_model(model, caps)
    runs["patched"] = train(model, arguments, training)

    model.eval()
    tokens = torch.arange(64, device=model.device)[None]
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    if training.process_index == 0:
        print(model.base_model.model.longmoe)
        for name, (losses, peaks) in runs.items():
            peaks = ", ".join(f"{part} {format_bytes(peaks[part])}" for part in ("dispatch", "vocab"))
            print(f"{name}: losses {' '.join(f'{loss:.6f}' for loss in losses)}; peaks: {peaks}")
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(model.device)
        plain = PeftModel.from_pretrained(plain, f"{arguments.output_dir}/adapter").eval()
        with torch.no_grad():
            apart = (plain(input_ids=tokens).logits - logits).abs().max() / logits.abs().max()
        print(f"The adapter in stock PEFT: logits differ by {apart:.1e}.")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def save_base(arguments: LoraArguments, training: TrainingArguments) -> str:
    """A small model made from its config, in a folder: one that is sharded is so when it is loaded."""
    folder = f"{arguments.output_dir}/base"
    with training.main_process_first():
        if training.process_index == 0:
            set_seed(0)
            config = AutoConfig.for_model(
                "qwen3_moe",
                vocab_size=4096,
                hidden_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_experts=16,
                num_experts_per_tok=4,
                moe_intermediate_size=64,
                intermediate_size=128,
            )
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def adapted(arguments: LoraArguments, base: str) -> PeftModel:
    sharding = {}
    if arguments.expert_parallel:
        ranks = int(os.environ["WORLD_SIZE"])
        sharding["distributed_config"] = DistributedConfig(
            fsdp_size=ranks, ep_size=ranks, ep_implementation="pipelined_llep"
        )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **sharding)
    set_seed(0)  # both runs start from the same factors
    lora = LoraConfig(
        r=arguments.r,
        target_modules=["q_proj", "v_proj", "lm_head"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    return get_peft_model(model, lora)


def train(
    model: PeftModel, arguments: LoraArguments, training: TrainingArguments
) -> tuple[list[float], dict[str, int]]:
    """The loss of each step, and the peak of each component; leaves the adapter in the output folder."""
    tokens = torch.randint(0, 4096, (arguments.steps * training.world_size, arguments.seq_len)).tolist()
    data = Dataset.from_dict({"input_ids": tokens, "labels": tokens})
    peaks = ComponentPeakCallback(every=1, output_dir=f"{arguments.output_dir}/peaks")
    trainer = LongMoETrainer(model=model, args=training, train_dataset=data, callbacks=[peaks])
    trainer.train()
    trainer.save_model(f"{arguments.output_dir}/adapter")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {part: found.peak for part, found in peaks.report.components.items()}


if __name__ == "__main__":
    main()
