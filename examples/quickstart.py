"""
Long-context MoE training with the dispatch and vocabulary peaks bounded: the same steps before and after.

    accelerate launch --config_file accelerate_configs/cpu_2proc.yaml examples/quickstart.py
    python examples/quickstart.py --seq_len 8192 --vocab_budget 32MiB
    accelerate launch --config_file accelerate_configs/cpu_2proc_ep.yaml examples/quickstart.py --expert_parallel
    accelerate launch examples/quickstart.py --offload

Trains a few stock steps, then the same steps on the same data from the same seed with `patch_model`. Prints both loss
curves, which must agree to rounding (else the exit code is 1), and the peaks of each component, before and after.
Leaves `peaks.json` and `peaks.png` in the output folder. Needs no network: the default model is a small Mixtral made
from its config, and the default text is the Python standard library's own sources. With `--expert_parallel` the model
is sharded (FSDP2) and its experts are divided over the processes: Transformers' all-to-all and gathered LM head
against PipelinedLLEP and Ring-DTP. With `--offload` the patched run also has `LongMoEPlugin`: checkpoint boundaries
and optimizer state in host memory (which, on a machine without an accelerator, is where they are).
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from accelerate.utils import gather_object
from packing import PackedStream, pack
from text import check_vocabulary, read_documents, train_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.distributed import DistributedConfig

from hf_longmoe import (
    ComponentPeakCallback,
    DispatchConfig,
    LongMoEConfig,
    LongMoEPlugin,
    VocabConfig,
    patch_model,
    unpatch_model,
)
from hf_longmoe.peaks import PeakReport, save_reports
from hf_longmoe.peaks.plot import plot_reports
from hf_longmoe.peaks.table import print_reports

# Both runs are fp32 and differ in the order of their sums, 1e-6 of the loss. AdamW and the router's top-k make a
# difference grow with the steps: step n may differ by n times this.
TOLERANCE = 3e-5

Result = TypeVar("Result")


@dataclass
class QuickstartArguments:
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or folder. Default: a Mixtral of 31 M made from its config."}
    )
    seq_len: int = field(default=4096, metadata={"help": "Tokens in a sequence."})
    dataset: str | None = field(
        default=None, metadata={"help": "Folder of text or `datasets` name. Default: Python's standard library."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of a `datasets` name."})
    text_column: str | None = field(default=None, metadata={"help": "Column with the text. Default: found."})
    dispatch_budget: str = field(default="8MiB", metadata={"help": "Bytes in flight in one expert block."})
    vocab_budget: str = field(default="32MiB", metadata={"help": "Bytes of logits and of all made from them."})
    steps: int = field(default=3, metadata={"help": "Optimizer steps of each run, one sequence a process each."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Constant; AdamW."})
    output_dir: str = field(default="runs/quickstart", metadata={"help": "Tokenizer, peaks.json, peaks.png."})
    seed: int = field(default=0, metadata={"help": "Of the weights."})
    expert_parallel: bool = field(default=False, metadata={"help": "Divide the experts over the processes (FSDP2)."})
    offload: bool = field(default=False, metadata={"help": "Boundaries and optimizer state in host memory."})
    use_cpu: bool = field(default=False, metadata={"help": "Leave accelerators alone; implied if there are too few."})


def main() -> None:
    (arguments,) = HfArgumentParser(QuickstartArguments).parse_args_into_dataclasses()
    training = training_arguments(arguments)
    longmoe_config, dataset = one_line_errors(training, lambda: prepare(arguments, training))

    losses, reports = {}, {}
    losses["stock"], reports["stock"] = train(load(arguments, training, "all_to_all"), training, dataset, "stock")
    gc.collect()  # the Trainer and its model refer to each other: the first run's memory would stay for the second
    model = patch_model(load(arguments, training, "pipelined_llep"), longmoe_config)
    head = [entry for entry in model.longmoe.entries if entry.component == "vocab"]
    plugin = LongMoEPlugin(longmoe_config) if arguments.offload else None
    losses["patched"], reports["patched"] = train(model, training, dataset, "patched", plugin)

    differences = [abs(a - b) for a, b in zip(losses["stock"], losses["patched"], strict=True)]
    equal = all(difference <= step * TOLERANCE for step, difference in enumerate(differences, start=1))
    if training.process_index == 0:
        print("LM head:", *(f"{e.component}, {e.schedule} ({e.note})" for e in head))
        print_losses(losses)
        print_reports(reports)
        save_reports(Path(arguments.output_dir, "peaks.json"), reports)
        try:
            plot_reports(Path(arguments.output_dir, "peaks.png"), reports)
        except ImportError as error:
            print(f"peaks.png is not written. {error}")
        verdict = "equal to rounding" if equal else "NOT EQUAL"
        print(f"Losses {verdict}: they differ by {max(differences):.1e} at most (tolerance {TOLERANCE:.0e} x step).")
        print(f"Peaks of both runs: {arguments.output_dir}/peaks.json and peaks.png")
    sys.exit(0 if equal else 1)


def training_arguments(arguments: QuickstartArguments) -> TrainingArguments:
    # A launch file's `use_cpu` does not reach TrainingArguments, and without it there are as many runs as processes.
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return TrainingArguments(
        output_dir=arguments.output_dir,
        max_steps=arguments.steps,
        per_device_train_batch_size=1,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        save_strategy="no",
        seed=arguments.seed,
        use_cpu=arguments.use_cpu or torch.accelerator.device_count() < processes,
        dataloader_pin_memory=torch.accelerator.is_available(),
    )


def one_line_errors(training: TrainingArguments, setup: Callable[[], Result]) -> Result:
    """
    Runs `setup` on the main process, then on the others (which find the main process's files). If it fails anywhere,
    every process ends with exit code 2 and the main one prints one line: no traceback, and no rank left waiting.
    """
    result, problem = None, None
    for turn_of_main in (True, False):
        if (training.process_index == 0) is turn_of_main:
            try:
                result = setup()
            except (OSError, ValueError) as error:
                problem = textwrap.shorten(str(error), 500)
        problems = [line for line in gather_object([problem]) if line]
        if problems:
            if training.process_index == 0:
                print(f"error: {problems[0]}", file=sys.stderr, flush=True)
            sys.exit(2)
    return result


def prepare(arguments: QuickstartArguments, training: TrainingArguments) -> tuple[LongMoEConfig, PackedStream]:
    """All that can be refused is refused here, the cheapest first."""
    if arguments.expert_parallel and training.world_size < 2:
        raise ValueError(
            "expert_parallel=True needs several processes; launch with accelerate_configs/cpu_2proc_ep.yaml."
        )
    for name in ("steps", "seq_len"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"{name}={getattr(arguments, name)} must be at least 1.")
    longmoe_config = LongMoEConfig(
        dispatch=DispatchConfig(budget=arguments.dispatch_budget), vocab=VocabConfig(budget=arguments.vocab_budget)
    )
    vocab_size = model_config(arguments).get_text_config().vocab_size
    tokenizer_path = arguments.model_name_or_path or os.path.join(arguments.output_dir, "tokenizer")
    source = (arguments.dataset, arguments.dataset_config_name, arguments.text_column)
    if arguments.model_name_or_path is None and training.process_index == 0:
        train_tokenizer(read_documents(*source), vocab_size).save_pretrained(tokenizer_path)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    check_vocabulary(tokenizer, vocab_size)
    dataset = pack(read_documents(*source), tokenizer, arguments.seq_len)
    model = patch_model(build_model(arguments), longmoe_config)  # to check the budgets; the runs build their own
    if arguments.expert_parallel and arguments.model_name_or_path is None and training.process_index == 0:
        unpatch_model(model).save_pretrained(built_in_folder(arguments))  # a model is sharded when it is loaded
    return longmoe_config, dataset


def model_config(arguments: QuickstartArguments) -> PreTrainedConfig:
    if arguments.model_name_or_path is not None:
        return AutoConfig.from_pretrained(arguments.model_name_or_path)
    return AutoConfig.for_model(
        "mixtral",
        vocab_size=32_000,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        num_local_experts=32,
        num_experts_per_tok=2,
        max_position_embeddings=arguments.seq_len,
        output_router_logits=True,  # adds the router's load-balancing loss
    )


def build_model(arguments: QuickstartArguments) -> PreTrainedModel:
    """The same weights each time, in fp32."""
    set_seed(arguments.seed)
    if arguments.model_name_or_path is None:
        return AutoModelForCausalLM.from_config(model_config(arguments))
    return AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path, dtype=torch.float32)


def built_in_folder(arguments: QuickstartArguments) -> str:
    return os.path.join(arguments.output_dir, "model")


def load(arguments: QuickstartArguments, training: TrainingArguments, ep_implementation: str) -> PreTrainedModel:
    """The model of a run."""
    if not arguments.expert_parallel:
        return build_model(arguments)
    distributed_config = DistributedConfig(
        fsdp_size=training.world_size, ep_size=training.world_size, ep_implementation=ep_implementation
    )
    if ep_implementation == "pipelined_llep" and not model_config(arguments).tie_word_embeddings:
        distributed_config.fsdp_plan = {"lm_head": "free_full_weight"}  # a head that no process gathers
    return AutoModelForCausalLM.from_pretrained(
        arguments.model_name_or_path or built_in_folder(arguments),
        dtype=torch.float32,
        distributed_config=distributed_config,
    )


def train(
    model: PreTrainedModel,
    training: TrainingArguments,
    dataset: PackedStream,
    name: str,
    plugin: LongMoEPlugin | None = None,
) -> tuple[list[float], PeakReport]:
    """The loss of each step, and the peaks of all."""
    peaks = ComponentPeakCallback(every=1, output_dir=os.path.join(training.output_dir, name))
    trainer = Trainer(model=model, args=training, train_dataset=dataset, callbacks=[peaks])
    with contextlib.nullcontext() if plugin is None else plugin.install(trainer.accelerator):
        trainer.train()
        if plugin is not None and training.process_index == 0:
            print(plugin)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], peaks.report


def print_losses(losses: dict[str, list[float]]) -> None:
    print("\nLoss of each step\nstep", *(f"{name:>12}" for name in (*losses, "difference")))
    for step, (stock, patched) in enumerate(zip(*losses.values(), strict=True), start=1):
        print(f"{step:4d} {stock:12.6f} {patched:12.6f} {abs(stock - patched):12.1e}")
    print()


if __name__ == "__main__":
    main()
