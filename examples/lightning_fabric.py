"""
A plain loop of Lightning Fabric with all four schedules: three lines beside `fabric.setup`.

    python examples/lightning_fabric.py
    python examples/lightning_fabric.py --steps 20 --seq_len 1024

Trains a small Mixtral made from its config on random tokens, so that it needs no network. Prints the loss of each step
and what was patched. For `lightning.Trainer` the same is a callback, `LongMoECallback(config)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from lightning import Fabric
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, PreTrainedModel, set_seed

from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig
from hf_longmoe.integrations.lightning import LongMoESchedules


@dataclass
class LoopArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Hub id or folder. Default: a small one."})
    steps: int = field(default=3, metadata={"help": "Optimizer steps."})
    seq_len: int = field(default=256, metadata={"help": "Tokens in a sequence."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Constant."})


def main() -> None:
    (arguments,) = HfArgumentParser(LoopArguments).parse_args_into_dataclasses()
    set_seed(0)
    fabric = Fabric(devices=1)
    model = load(arguments).train()
    model.activation_checkpointing_enable()
    vocab_size = model.config.get_text_config().vocab_size
    config = LongMoEConfig(dispatch=DispatchConfig(budget="4MiB"), vocab=VocabConfig(budget="4MiB"))
    with LongMoESchedules(config).install(model, fabric.device) as schedules:
        fabric.print(model.longmoe)
        model, optimizer = fabric.setup(model, schedules.adamw(model.parameters(), lr=arguments.learning_rate))
        for step in range(1, arguments.steps + 1):
            batch = torch.randint(vocab_size, (1, arguments.seq_len), device=fabric.device)
            loss = model(input_ids=batch, labels=batch).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            fabric.print(f"step {step}: loss {loss.item():.6f}")


def load(arguments: LoopArguments) -> PreTrainedModel:
    if arguments.model_name_or_path is not None:
        return AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
    config = AutoConfig.for_model(
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
    return AutoModelForCausalLM.from_config(config)


if __name__ == "__main__":
    main()
