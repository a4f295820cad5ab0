"""`hf-longmoe plan`: which peak dies first, and the caps that keep a device's memory, before a GPU hour is spent."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from hf_longmoe.commands import UsageError
from hf_longmoe.sizes import parse_bytes, parse_tokens

__all__ = ["add_arguments", "run"]

_GATE = 0.03  # relative difference that `--verify` allows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model", metavar="MODEL", help="a Hub id, a folder, a config.json, or a model type (the sizes of its defaults)"
    )
    add("--seq-len", required=True, metavar="N", help="tokens of a sequence, over all ranks that share it: 128k, 1M")
    add("--device-memory", metavar="SIZE", help="of one device: 80GiB; without it nothing is said of what fits")
    add("--world-size", type=int, default=1, metavar="N", help="ranks (default: 1)")
    add("--ep", type=int, default=1, metavar="N", help="ranks that share a layer's experts (default: 1)")
    add("--cp", type=int, default=1, metavar="N", help="ranks that share a sequence (default: 1)")
    add("--fsdp", type=int, metavar="N", help="ranks that share parameters and their state (default: all)")
    add("--micro-batch", type=int, default=1, metavar="N", help="sequences of one forward (default: 1)")
    add("--dtype", default="bfloat16", help="of the computation (default, and the only one planned: bfloat16)")
    add("--parameter-dtype", metavar="DTYPE", help="of kept parameters, gradients and moments (default: --dtype)")
    add("--checkpointing", default="non-reentrant", help="non-reentrant (default), reentrant or off")
    add(
        "--imbalance",
        type=float,
        metavar="X",
        help="under --ep: rows of the fullest rank over the mean (default: 1.3)",
    )
    add("--config", type=Path, metavar="FILE", help="a YAML file of caps, in place of those chosen")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of the model's config; repeatable")
    add("--verify", action="store_true", help="also run fake steps at two depths, and print both side by side")
    add("--json", action="store_true", help="print the plan as JSON, in bytes")
    add("--plot", type=Path, metavar="FILE", help="draw the four peaks over the context length to FILE, a PNG")
    add("--trust-remote-code", action="store_true", help="let code that comes with the model run")


def run(arguments: argparse.Namespace) -> int:
    """
    Returns 1 if nothing makes it fit, or `--verify` finds a component off by more than 3%.

    Raises:
        `UsageError`: what was given cannot be planned, for the reason in the message.
    """
    if arguments.plot is not None and not arguments.plot.absolute().parent.is_dir():
        raise UsageError(f"--plot {arguments.plot}: there is no folder {arguments.plot.absolute().parent}")
    layout, memory, caps = _given(arguments)
    import logging
    import warnings

    warnings.simplefilter("ignore")  # of models that are built without data
    logging.getLogger("transformers").setLevel(logging.ERROR)
    room = "hf_longmoe.integrations.transformers"
    config_of = importlib.import_module(f"{room}.planned_config").config_of
    planning = importlib.import_module(f"{room}.planning")
    try:
        config = config_of(arguments.model, changes=_changes(arguments.set), remote_code=arguments.trust_remote_code)
        found = planning.plan(config, layout, memory, caps=caps)
        verified = found.planner.verify(found.config) if arguments.verify else None
    except planning.DoesNotFit as error:
        print(f"hf-longmoe plan: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        raise UsageError(str(error)) from error
    if arguments.plot is not None:
        from hf_longmoe.planner.plot import plot_plan

        try:
            plot_plan(arguments.plot, found)
        except (ImportError, OSError, ValueError) as error:
            raise UsageError(f"--plot {arguments.plot}: {error}") from error
    if arguments.json:
        values = found.to_dict()
        if verified is not None:
            values["verified"] = verified.to_dict()
        print(json.dumps(values, indent=2))
    else:
        from hf_longmoe.planner.table import print_plan, print_verification

        print_plan(found, device_memory=arguments.device_memory if caps is None else None)
        if verified is not None:
            print_verification(verified)
        if arguments.plot is not None:
            print(f"\nPlot: {arguments.plot}")
    too_large = caps is not None and found.fits is False
    return 1 if too_large or (verified is not None and verified.worst.difference > _GATE) else 0


def _given(arguments: argparse.Namespace) -> tuple[Any, int | None, Any]:
    """Checked before anything is imported that takes long."""
    from hf_longmoe.config import LongMoEConfig
    from hf_longmoe.planner import Layout

    try:
        memory = None if arguments.device_memory is None else parse_bytes(arguments.device_memory, "--device-memory")
        imbalance = arguments.imbalance
        if imbalance is None:
            imbalance = min(1.3, arguments.ep) if arguments.ep > 1 else 1.0
        layout = Layout(
            seq_len=parse_tokens(arguments.seq_len, "--seq-len"),
            micro_batch=arguments.micro_batch,
            world_size=arguments.world_size,
            ep_size=arguments.ep,
            cp_size=arguments.cp,
            fsdp_size=arguments.fsdp,
            dtype=arguments.dtype,
            parameter_dtype=arguments.parameter_dtype,
            checkpointing=arguments.checkpointing,
            imbalance=imbalance,
        )
        caps = None if arguments.config is None else LongMoEConfig.from_yaml(arguments.config)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    return layout, memory, caps


def _changes(given: list[str]) -> dict[str, Any]:
    import yaml

    changes = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise UsageError(f"--set {text}: write NAME=VALUE, e.g. --set num_hidden_layers=48")
        try:
            changes[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"--set {text}: {value!r} is not YAML, e.g. 48, true or null") from error
    return changes
