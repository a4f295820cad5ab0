"""
A plain training loop, without a Trainer: boundaries and optimizer state in host memory, by `LongMoEPlugin`.

    accelerate launch --config_file accelerate_configs/cpu_2proc.yaml examples/accelerate_loop.py
    LONGMOE_OPTIMIZER_UPDATE_ON=cpu accelerate launch examples/accelerate_loop.py --steps 20

Trains a small Mixtral made from its config on random tokens, so that it needs no network. Prints the loss of each step
and where boundaries and optimizer state were. On a machine without an accelerator the model's memory is the host's:
nothing is copied then, and the update runs in place.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, PreTrainedModel, set_seed

from hf_longmoe import LongMoEConfig, LongMoEPlugin, OffloadStreamAdamW, patch_model


@dataclass
class LoopArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Hub id or folder. Default: a small one."})
    steps: int = field(default=3, metadata={"help": "Optimizer steps."})
    seq_len: int = field(default=256, metadata={"help": "Tokens in a sequence."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Falls linearly to 0."})
    save_dir: str | None = field(default=None, metadata={"help": "Folder for a checkpoint after the last step."})
    resume_from: str | None = field(default=None, metadata={"help": "Folder of such a checkpoint to go on from."})


def main() -> None:
    (arguments,) = HfArgumentParser(LoopArguments).parse_args_into_dataclasses()
    if arguments.steps < 1:
        raise SystemExit(f"error: steps={arguments.steps} must be at least 1.")
    set_seed(0)
    # A launch file's `use_cpu` has processes share the machine; without it Accelerate may still find an accelerator.
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    accelerator = Accelerator(cpu=torch.accelerator.device_count() < processes or None)
    config = LongMoEConfig()  # every cap; LONGMOE_<PART>_<FIELD> in the environment changes one at launch
    model = patch_model(load(arguments), config)
    model.activation_checkpointing_enable()

    with LongMoEPlugin(config).install(accelerator) as plugin:
        optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
        scheduler = LambdaLR(optimizer, lambda step: 1 - step / arguments.steps)
        data = DataLoader(tokens(arguments, model, accelerator.num_processes), batch_size=1)
        model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, scheduler, data)
        if arguments.resume_from is not None:
            accelerator.load_state(arguments.resume_from)
        model.train()
        for step, batch in enumerate(data, start=1):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), reduction="mean")
            accelerator.print(f"step {step}: loss {mean:.6f}")
        accelerator.print(plugin)
        if arguments.save_dir is not None:
            accelerator.save_state(arguments.save_dir)
        assert isinstance(optimizer.optimizer, OffloadStreamAdamW)
    # DistributedDataParallel must not outlive the process group: on gloo its end can then wait for ever.
    model, optimizer, scheduler, data = accelerator.free_memory(model, optimizer, scheduler, data)
    accelerator.end_training()


def load(arguments: LoopArguments) -> PreTrainedModel:
    if arguments.model_name_or_path is not None:
        return AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "mixtral",
            vocab_size=2048,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=8,
            max_position_embeddings=arguments.seq_len,
        )
    )


def tokens(arguments: LoopArguments, model: PreTrainedModel, processes: int) -> torch.Tensor:
    """[steps * processes, seq_len]: a new sequence for each step and process."""
    vocab_size = model.config.get_text_config().vocab_size
    return torch.randint(vocab_size, (arguments.steps * processes, arguments.seq_len))


if __name__ == "__main__":
    main()
