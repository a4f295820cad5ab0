"""The Python and the launch line that use a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from hf_longmoe.config import LongMoEConfig
from hf_longmoe.planner.plan import Plan
from hf_longmoe.planner.shape import Layout

__all__ = ["launch_line", "python_lines"]


def python_lines(plan: Plan, device_memory: str | None = None) -> list[str]:
    """
    What brings the plan about: how the model is divided when it is loaded, its caps, and the Trainer's arguments that
    the plan is of. Of one process, what stands beside a script's own model and trainer.

    Arguments:
        device_memory: as the user wrote it; the caps are written out without it.
    """
    layout, config, together = plan.layout, plan.config, plan.layout.world_size > 1
    names = {"LongMoEConfig"} | (set() if device_memory else set(_classes(config)))
    names |= set() if plan.config_is_empty else {"patch_model"}
    names |= {"LongMoEPlugin"} if _installs(plan) else set()
    names |= {"LongMoETrainer"} if together else set()
    lines = [f"from hf_longmoe import {', '.join(sorted(names, key=str.lower))}"]
    if together:
        lines = [
            *(["from accelerate.utils import ParallelismConfig"] if layout.cp_size > 1 else []),
            "from transformers import AutoModelForCausalLM, TrainingArguments",
            "from transformers.distributed import DistributedConfig",
            *lines,
            "",
            f"sharding = DistributedConfig({', '.join(_sharding(plan))})",
            f'model = AutoModelForCausalLM.from_pretrained(name, dtype="{layout.parameter_dtype}",'
            " distributed_config=sharding)",
        ]
    else:
        lines.append("")
    lines.append(f"config = {_written(config) if device_memory is None else _for_budget(layout, device_memory)}")
    if plan.config_is_empty:
        lines.append("# No caps: nothing to patch.")
    else:
        lines.append("patch_model(model, config)")
    if together:
        lines.append(f"args = TrainingArguments(output_dir, {', '.join(_arguments(layout))})")
        lines.append("trainer = LongMoETrainer(model=model, args=args, train_dataset=dataset)")
    if _installs(plan):
        lines.append("LongMoEPlugin(config).install(trainer.accelerator)  # or a plain Accelerator, before prepare")
    return lines


def launch_line(plan: Plan) -> str:
    """One for the machine at hand where it has all the ranks; else one for each of several."""
    ranks = plan.layout.world_size
    machines = -(-ranks // 8)
    several = f" --num_machines {machines} --machine_rank $RANK --main_process_ip $HOST" if machines > 1 else ""
    multi = " --multi_gpu" if ranks > 1 else ""
    return f"accelerate launch{multi} --num_processes {ranks}{several} train.py"


def _installs(plan: Plan) -> bool:
    """The plugin offloads, and has ranks share sequences."""
    return plan.config.boundaries is not None or plan.config.optimizer is not None or plan.layout.cp_size > 1


def _for_budget(layout: Layout, device_memory: str) -> str:
    usual = dataclasses.asdict(Layout(seq_len=layout.seq_len, world_size=layout.world_size, dtype=layout.dtype))
    usual |= {"world_size": 1, "dtype": "bfloat16"}
    given = "".join(f", {k}={v!r}" for k, v in dataclasses.asdict(layout).items() if v != usual[k])
    return f'LongMoEConfig.for_budget(model.config, seq_len={layout.seq_len}, device_memory="{device_memory}"{given})'


def _sharding(plan: Plan) -> Iterator[str]:
    yield f"fsdp_size={plan.layout.fsdp_size}"
    if plan.layout.ep_size > 1:
        yield f"ep_size={plan.layout.ep_size}"
        if plan.config.dispatch is not None:
            yield 'ep_implementation="pipelined_llep"'
    if plan.config.vocab is not None and plan.config.vocab.schedule != "tiles" and not plan.shape.tied:
        yield 'fsdp_plan={"lm_head": "free_full_weight"}'


def _arguments(layout: Layout) -> Iterator[str]:
    yield f"per_device_train_batch_size={layout.micro_batch}"
    if layout.checkpointing != "off":
        yield "activation_checkpointing=True"
    if layout.checkpointing == "reentrant":
        yield 'activation_checkpointing_kwargs={"use_reentrant": True}'
    if layout.parameter_dtype != layout.dtype:
        yield "bf16=True"
    if layout.cp_size > 1:
        groups = layout.world_size // layout.cp_size
        yield f"parallelism_config=ParallelismConfig(cp_size={layout.cp_size}, dp_shard_size={groups})"


def _classes(config: LongMoEConfig) -> list[str]:
    parts = (getattr(config, field.name) for field in dataclasses.fields(config))
    return sorted(type(part).__name__ for part in parts if part is not None)


def _written(config: LongMoEConfig) -> str:
    parts = []
    for field in dataclasses.fields(config):
        part = getattr(config, field.name)
        if part is None:
            parts.append(f"{field.name}=None")
        else:
            given = (f"{name}={getattr(part, name)!r}" for name in _told(part))
            parts.append(f"{field.name}={type(part).__name__}({', '.join(given)})")
    return f"LongMoEConfig({', '.join(parts)})"


def _told(part: Any) -> list[str]:
    """The sizes, and whatever is not as it is by default."""
    usual = part._defaults
    return [name for name in usual if name in ("budget", "bucket") or getattr(part, name) != usual[name]]
