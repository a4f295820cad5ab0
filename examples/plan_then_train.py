"""
Plan first: caps from a device's memory, then a training run whose peaks are held against the plan.

    python examples/plan_then_train.py
    python examples/plan_then_train.py --seq_len 4k --device_memory 100MiB
    accelerate launch examples/plan_then_train.py --model_name_or_path allenai/OLMoE-1B-7B-0924 --device_memory 80GiB

From the config alone, before any weight is there: which peak would end the run, and caps with which it fits. Then a
few steps of the Trainer in bfloat16 with these caps; at the end `ComponentPeakCallback` prints each measured peak
beside its prediction. Needs no network: the default model is a small Mixtral made from its config, on random tokens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    PreTrainedConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_longmoe import ComponentPeakCallback, Layout, LongMoEPlugin, patch_model, plan
from hf_longmoe.planner.table import print_plan
from hf_longmoe.sizes import parse_tokens


@dataclass
class PlanArguments:
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or folder. Default: a Mixtral of 1 M made from its config."}
    )
    seq_len: str = field(default="1k", metadata={"help": "Tokens in a sequence: 1024, 1k."})
    device_memory: str = field(default="48MiB", metadata={"help": "What the step may take on each device."})
    steps: int = field(default=3, metadata={"help": "Optimizer steps."})
    output_dir: str = field(default="runs/plan", metadata={"help": "For peaks.json and peaks.png."})


def main() -> None:
    (arguments,) = HfArgumentParser(PlanArguments).parse_args_into_dataclasses()
    seq_len = parse_tokens(arguments.seq_len, "--seq_len")
    training = TrainingArguments(
        output_dir=arguments.output_dir,
        max_steps=arguments.steps,
        per_device_train_batch_size=1,
        bf16=False,  # the model itself is in bfloat16
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        save_strategy="no",
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    config = load_config(arguments, seq_len)
    try:
        # Each process has the whole model (DDP): nothing is divided.
        layout = Layout(seq_len=seq_len, world_size=training.world_size, fsdp_size=1)
        planned = plan(config, layout, arguments.device_memory)
    except ValueError as error:
        sys.exit(str(error))
    print_plan(planned, device_memory=arguments.device_memory)

    set_seed(0)
    if arguments.model_name_or_path is None:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path, dtype=torch.bfloat16)
    if not planned.config_is_empty:
        patch_model(model, planned.config)
    callback = ComponentPeakCallback(plan=planned)
    trainer = Trainer(model=model, args=training, train_dataset=tokens(config, seq_len), callbacks=[callback])
    if planned.config.boundaries is not None or planned.config.optimizer is not None:
        LongMoEPlugin(planned.config).install(trainer.accelerator)
    trainer.train()


def load_config(arguments: PlanArguments, seq_len: int) -> PreTrainedConfig:
    if arguments.model_name_or_path is not None:
        return AutoConfig.from_pretrained(arguments.model_name_or_path)
    return AutoConfig.for_model(
        "mixtral",
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        max_position_embeddings=seq_len,
    )


def tokens(config: PreTrainedConfig, seq_len: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.get_text_config().vocab_size, (8, seq_len), generator=generator).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


if __name__ == "__main__":
    main()
