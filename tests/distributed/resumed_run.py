"""A small sharded run under `LongMoETrainer`, stock or with every schedule on, for the tests of its checkpoints."""

import json
import random
from pathlib import Path

import numpy
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import ParallelismConfig
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

from hf_longmoe import DispatchConfig, LongMoEConfig, LongMoEPlugin, OptimizerConfig, VocabConfig, patch_model
from hf_longmoe.integrations.transformers import LongMoETrainer
from hf_longmoe.schedules.host import FakeEngine

VOCABULARY, SAMPLES, LENGTH = 61, 40, 12
OPTIONS = dict(
    vocab_size=VOCABULARY,
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
)


def make_model(folder, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", **{**OPTIONS, **options})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Data(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Losses(TrainerCallback):
    """Each rank 0's losses to a file at once, as the process may be killed."""

    def __init__(self, path):
        self.path = path

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            with open(self.path, "a") as file:
                file.write(json.dumps([state.global_step, logs["loss"].hex()]) + "\n")


def read_losses(path):
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return dict(json.loads(line) for line in lines)


def trainer(
    model_folder,
    run,
    log,
    *,
    ranks,
    ep=None,
    cp=1,
    streaming=False,
    callbacks=(),
    dtype="float32",
    dropout=0.1,
    **arguments,
):
    """
    Arguments:
        cp: ranks that share a sequence.
        dropout: of the attention, so that a resumed run needs the random numbers; other ranks draw others.

    Returns:
        The trainer, and the engine of its copies where it is `streaming`.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    sharding = {}
    if ranks > 1:
        sharding["distributed_config"] = DistributedConfig(
            fsdp_size=ranks,
            ep_size=ep or ranks,
            ep_implementation="pipelined_llep" if streaming else "all_to_all",
            **({"fsdp_plan": {"lm_head": "free_full_weight"}} if streaming else {}),
        )
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=getattr(torch, dtype), attention_dropout=dropout, **sharding
    )
    caps = LongMoEConfig(
        dispatch=DispatchConfig(budget="1MiB"),
        vocab=VocabConfig(budget="64KiB"),
        optimizer=OptimizerConfig(bucket="16KiB", update_on="cpu"),
    )
    if streaming:
        patch_model(model, caps)
    options = dict(
        output_dir=str(run),
        use_cpu=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4 * cp // ranks,
        max_steps=12,
        learning_rate=1e-2,
        warmup_steps=1,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        activation_checkpointing=streaming,
    )
    if cp > 1:
        options["parallelism_config"] = ParallelismConfig(cp_size=cp, dp_shard_size=ranks // cp)
    args = TrainingArguments(**{**options, **arguments})
    data = {"train_dataset": Data(), "eval_dataset": Data()}
    made = LongMoETrainer(model=model, args=args, callbacks=[Losses(log), *callbacks], **data)
    engine = None
    if streaming:
        engine = FakeEngine(seed=distributed.get_rank() if ranks > 1 else 0)
        LongMoEPlugin(caps, engine=engine).install(made.accelerator)
    return made, engine
