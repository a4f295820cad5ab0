"""
TRL's `SFTTrainer` on a patched MoE model: completions only, with or without LoRA, one line changed.

    python examples/trl_sft.py
    accelerate launch --config_file accelerate_configs/cpu_2proc.yaml examples/trl_sft.py --lora
    python examples/trl_sft.py --packing --seq_len 4096 --vocab_budget 64MiB

The change: `LongMoESFTTrainer` for `SFTTrainer`. Loss, entropy and token accuracy are those of the stock trainer, and
logits exist one tile at a time. Prints them step by step, and the peaks. Needs no network: a small Mixtral from its
config, and functions of the Python standard library: the line of `def` is the prompt and the rest the completion.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from datasets import Dataset
from peft import LoraConfig
from text import read_documents, train_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel, set_seed
from trl import SFTConfig

from hf_longmoe import ComponentPeakCallback, DispatchConfig, LongMoEConfig, VocabConfig, patch_model
from hf_longmoe.integrations.trl import LongMoESFTTrainer


@dataclass
class SFTArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Hub id or folder. Default: a small one."})
    dataset: str | None = field(default=None, metadata={"help": "Folder of Python. Default: the standard library."})
    steps: int = field(default=4, metadata={"help": "Optimizer steps, two examples a process each."})
    seq_len: int = field(default=512, metadata={"help": "Tokens of an example, or of a packed row, at most."})
    packing: bool = field(default=False, metadata={"help": "Several examples in a row."})
    lora: bool = field(default=False, metadata={"help": "Train adapters of the attention only."})
    dispatch_budget: str = field(default="2MiB", metadata={"help": "Bytes in flight in one expert block."})
    vocab_budget: str = field(default="8MiB", metadata={"help": "Bytes of logits and of all made from them."})
    output_dir: str = field(default="runs/trl_sft", metadata={"help": "peaks.json, peaks.png."})


def main() -> None:
    (arguments,) = HfArgumentParser(SFTArguments).parse_args_into_dataclasses()
    set_seed(0)
    rows = list(islice(functions(arguments.dataset), 2000))
    if arguments.model_name_or_path is None:
        tokenizer = train_tokenizer(({"text": row["prompt"] + row["completion"]} for row in rows), vocab_size=8192)
        tokenizer.pad_token = tokenizer.eos_token
    else:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    config = LongMoEConfig(
        dispatch=DispatchConfig(budget=arguments.dispatch_budget), vocab=VocabConfig(budget=arguments.vocab_budget)
    )
    model = patch_model(load(arguments), config)
    args = SFTConfig(
        arguments.output_dir,
        max_steps=arguments.steps,
        max_length=arguments.seq_len,
        packing=arguments.packing,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        # Of several processes without an accelerator each, as a launch file's `use_cpu` says too.
        use_cpu=torch.accelerator.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        bf16=False,
        disable_tqdm=True,
    )
    trainer = LongMoESFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if arguments.lora else None,
        callbacks=[ComponentPeakCallback(every=1)],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        for step, log in enumerate((log for log in trainer.state.log_history if "loss" in log), start=1):
            numbers = (f"{name} {log[name]:.6f}" for name in ("loss", "entropy", "mean_token_accuracy"))
            print(f"step {step}:", *numbers)
        print(model.longmoe)


def load(arguments: SFTArguments) -> PreTrainedModel:
    if arguments.model_name_or_path is not None:
        return AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=8192,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        max_position_embeddings=arguments.seq_len,
        output_router_logits=True,
    )
    return AutoModelForCausalLM.from_config(config)


def functions(dataset: str | None) -> Iterator[dict[str, str]]:
    """Functions at the top of a file: the line of `def` as the prompt, and the body as the completion."""
    for document in read_documents(dataset):
        for found in re.finditer(r"^(def [^\n]*:\n)((?:[ \t][^\n]*\n|\n)+)", document["text"], re.MULTILINE):
            yield {"prompt": found[1], "completion": found[2].rstrip() + "\n"}


if __name__ == "__main__":
    main()
