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
    Arguments:
        device_memory: as the user wrote it; the caps are written out without it.
    """
    layout = plan.layout
    lines = ["from hf_longmoe import LongMoEConfig, LongMoEPlugin, patch_model", ""]
    if device_memory is None:
        lines[0] = lines[0].replace("import ", "import " + "".join(f"{name}, " for name in _classes(plan.config)))
        lines.append(f"config = {_written(plan.config)}")
    else:
        usual = dataclasses.asdict(Layout(seq_len=layout.seq_len, world_size=layout.world_size, dtype=layout.dtype))
        usual |= {"world_size": 1, "dtype": "bfloat16"}
        given = "".join(f", {k}={v!r}" for k, v in dataclasses.asdict(layout).items() if v != usual[k])
        lines.append(
            f"config = LongMoEConfig.for_budget(model.config, seq_len={layout.seq_len},"
            f' device_memory="{device_memory}"{given})'
        )
    if plan.config_is_empty:
        return [*lines, "# No caps: nothing to patch."]
    lines.append("patch_model(model, config)")
    if plan.config.boundaries is not None or plan.config.optimizer is not None:
        lines.append("LongMoEPlugin(config).install(trainer.accelerator)  # or a plain Accelerator, before prepare")
    return lines


def launch_line(plan: Plan) -> str:
    """One for the machine at hand where it has all the ranks; else one for each of several."""
    ranks, caps = plan.layout.world_size, " ".join(_variables(plan.config))
    machines = -(-ranks // 8)
    several = f" --num_machines {machines} --machine_rank $RANK --main_process_ip $HOST" if machines > 1 else ""
    multi = " --multi_gpu" if ranks > 1 else ""
    return f"{caps}{' ' if caps else ''}accelerate launch{multi} --num_processes {ranks}{several} train.py"


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


def _variables(config: LongMoEConfig) -> Iterator[str]:
    """The caps as variables of the launch, which a script's own `LongMoEConfig()` reads."""
    for field in dataclasses.fields(config):
        part = getattr(config, field.name)
        for name in [] if part is None else _told(part):
            yield f"LONGMOE_{field.name}_{name}".upper() + f"={getattr(part, name)}"
