"""
Fine-tuning on very long documents: all four schedules, with sequence, model and experts divided over all processes.

    accelerate launch --config_file accelerate_configs/cpu_2proc_cp.yaml examples/long_context_sft.py
    accelerate launch --config_file accelerate_configs/fsdp2_ep_cp_64proc.yaml --main_process_ip HOST \\
        --machine_rank 0 examples/long_context_sft.py --model_name_or_path zai-org/GLM-4.5-Air --seq_len 1M \\
        --device_memory 80GiB --attn_implementation flash_attention_2 --dataset my/books --save_steps 100

The first is a dry run on any machine: a small Mixtral made from its config, on the Python standard library's sources.
The launch file says how many processes share a sequence. Caps come from the plan (`--device_memory`) or are given.
Text is streamed from files here or from the Hub and packed to `--seq_len`, each document by itself; `--resume` goes on
from the last checkpoint, and from its place in the text.

What makes a script of the stock Trainer this one is four lines more, and two others:

    + from hf_longmoe import LongMoEConfig, LongMoEPlugin, LongMoETrainer, patch_model
      model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16", distributed_config=DistributedConfig(
    -     fsdp_size=8, ep_size=8))
    +     fsdp_size=8, ep_size=8, ep_implementation="pipelined_llep", fsdp_plan={"lm_head": "free_full_weight"}))
    + config = LongMoEConfig.for_budget(model.config, "1M", device_memory="80GiB", world_size=8, ep_size=8, cp_size=8)
    + patch_model(model, config)
    - trainer = Trainer(model=model, args=args, train_dataset=dataset)
    + trainer = LongMoETrainer(model=model, args=args, train_dataset=dataset)
    + LongMoEPlugin(config).install(trainer.accelerator)
      trainer.train()
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from accelerate import ParallelismConfig
from packing import PackedStream, StreamPosition, pack
from quickstart import one_line_errors
from text import check_vocabulary, read_documents, train_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)
from transformers.distributed import DistributedConfig

from hf_longmoe import (
    ComponentPeakCallback,
    DispatchConfig,
    Layout,
    LongMoEConfig,
    LongMoEPlugin,
    LongMoETrainer,
    VocabConfig,
    patch_model,
    plan,
)
from hf_longmoe.planner import Plan
from hf_longmoe.planner.table import print_plan
from hf_longmoe.sizes import parse_tokens


@dataclass
class LongContextArguments:
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or folder. Default: a Mixtral of 1 M made from its config."}
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "As from_pretrained takes it."})
    dtype: str = field(default="bfloat16", metadata={"help": "Of the weights and the computation."})
    seq_len: str = field(default="1k", metadata={"help": "Tokens of a sequence over the processes that share it: 1M."})
    dataset: str | None = field(
        default=None, metadata={"help": "Folder of text or `datasets` name. Default: Python's standard library."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of a `datasets` name."})
    text_column: str | None = field(default=None, metadata={"help": "Column with the text. Default: found."})
    device_memory: str | None = field(default=None, metadata={"help": "Of one device, 80GiB: caps are chosen to fit."})
    dispatch_budget: str = field(default="256MiB", metadata={"help": "Without device_memory: of one expert block."})
    vocab_budget: str = field(default="256MiB", metadata={"help": "Without device_memory: of the LM head."})
    steps: int = field(default=3, metadata={"help": "Optimizer steps, a sequence each of every group of processes."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Peak; cosine, a tenth of the steps to warm up."})
    save_steps: int = field(
        default=0, metadata={"help": "A checkpoint every so many steps, the last two kept; 0: none."}
    )
    resume: bool = field(default=False, metadata={"help": "Go on from the last checkpoint in output_dir."})
    output_dir: str = field(default="runs/long_context", metadata={"help": "A folder that all processes see."})
    seed: int = field(default=0, metadata={"help": "Of the default model's weights."})
    use_cpu: bool = field(default=False, metadata={"help": "Leave accelerators alone; implied if there are too few."})


def main() -> None:
    (arguments,) = HfArgumentParser(LongContextArguments).parse_args_into_dataclasses()
    training = training_arguments(arguments)
    config, planned, dataset = one_line_errors(training, lambda: prepare(arguments, training))

    model = load(arguments, training, config)
    if config.dispatch is not None or config.vocab is not None:
        patch_model(model, config)
    peaks = ComponentPeakCallback(output_dir=arguments.output_dir, plan=planned)
    position = StreamPosition(dataset, blocks_per_step=training.world_size // sharing())
    trainer = LongMoETrainer(model=model, args=training, train_dataset=dataset, callbacks=[peaks, position])
    with LongMoEPlugin(config).install(trainer.accelerator) as plugin:
        trainer.train(resume_from_checkpoint=arguments.resume)
        if training.process_index == 0:
            print(plugin)
        trained = os.path.join(arguments.output_dir, "trained")
        trainer.save_model(trained)
        if training.process_index == 0:
            load_tokenizer(arguments).save_pretrained(trained)


def training_arguments(arguments: LongContextArguments) -> TrainingArguments:
    # A launch file's `use_cpu` does not reach TrainingArguments, and without it there are as many runs as processes.
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return TrainingArguments(
        output_dir=arguments.output_dir,
        max_steps=arguments.steps,
        per_device_train_batch_size=1,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=arguments.steps // 10,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        save_strategy="steps" if arguments.save_steps else "no",
        save_steps=arguments.save_steps or 500,
        save_total_limit=2,
        seed=arguments.seed,
        bf16=False,  # the weights themselves are; the optimizer's masters and moments are float32
        use_cpu=arguments.use_cpu or torch.accelerator.device_count() < processes,
        dataloader_pin_memory=torch.accelerator.is_available(),
    )


def sharing() -> int:
    """Processes that share a sequence, as the launch file says."""
    return ParallelismConfig().cp_size


def prepare(
    arguments: LongContextArguments, training: TrainingArguments
) -> tuple[LongMoEConfig, Plan | None, PackedStream]:
    """All that can be refused is refused here, the cheapest first."""
    if training.world_size < 2:
        raise ValueError("Only one process; launch with a file of accelerate_configs, such as cpu_2proc_cp.yaml.")
    if training.world_size % sharing():
        raise ValueError(
            f"parallelism_config_cp_size={sharing()} does not divide the {training.world_size} processes."
        )
    if arguments.steps < 1:
        raise ValueError(f"steps={arguments.steps} must be at least 1.")
    seq_len = parse_tokens(arguments.seq_len, "seq_len")
    model_config = load_config(arguments, seq_len)
    config, planned = choose_caps(arguments, training, model_config, seq_len)
    built_in = folder_of(arguments)
    source = (arguments.dataset, arguments.dataset_config_name, arguments.text_column)
    if arguments.model_name_or_path is None and training.process_index == 0:
        train_tokenizer(read_documents(*source), model_config.vocab_size, 1_000_000).save_pretrained(built_in)
        set_seed(arguments.seed)
        # A model is divided while it is loaded, and so from a folder.
        AutoModelForCausalLM.from_config(model_config, dtype=getattr(torch, arguments.dtype)).save_pretrained(built_in)
    tokenizer = load_tokenizer(arguments)
    check_vocabulary(tokenizer, model_config.get_text_config().vocab_size)
    return config, planned, pack(read_documents(*source), tokenizer, seq_len)


def folder_of(arguments: LongContextArguments) -> str:
    """Of the model and its tokenizer; the default one is put there first."""
    return arguments.model_name_or_path or os.path.join(arguments.output_dir, "model")


def load_tokenizer(arguments: LongContextArguments) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder_of(arguments))


def load_config(arguments: LongContextArguments, seq_len: int) -> PreTrainedConfig:
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


def choose_caps(
    arguments: LongContextArguments, training: TrainingArguments, model_config: PreTrainedConfig, seq_len: int
) -> tuple[LongMoEConfig, Plan | None]:
    """By the plan for `device_memory`: what `LongMoEConfig.for_budget` gives, and why. Else as the arguments say."""
    if arguments.device_memory is None:
        dispatch = DispatchConfig(budget=arguments.dispatch_budget)
        return LongMoEConfig(dispatch=dispatch, vocab=VocabConfig(budget=arguments.vocab_budget)), None
    ranks = training.world_size
    layout = Layout(seq_len=seq_len, world_size=ranks, ep_size=ranks, cp_size=sharing(), dtype=arguments.dtype)
    planned = plan(model_config, layout, arguments.device_memory)
    if training.process_index == 0:
        print_plan(planned, device_memory=arguments.device_memory)
    return planned.config, planned


def load(arguments: LongContextArguments, training: TrainingArguments, config: LongMoEConfig) -> PreTrainedModel:
    """Parameters and experts divided over all processes."""
    name = folder_of(arguments)
    sharding = DistributedConfig(fsdp_size=training.world_size, ep_size=training.world_size)
    if config.dispatch is not None:
        sharding.ep_implementation = "pipelined_llep"
    if config.vocab is not None and not AutoConfig.from_pretrained(name).get_text_config().tie_word_embeddings:
        sharding.fsdp_plan = {"lm_head": "free_full_weight"}  # a head that no process gathers
    return AutoModelForCausalLM.from_pretrained(
        name,
        dtype=getattr(torch, arguments.dtype),
        attn_implementation=arguments.attn_implementation,
        distributed_config=sharding,
    )


if __name__ == "__main__":
    main()
