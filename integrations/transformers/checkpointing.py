"""What a checkpoint of a sharded model holds, written and read by torch.distributed.checkpoint as safetensors."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

__all__ = [
    "DESCRIPTION",
    "CheckpointError",
    "describe",
    "load_model",
    "load_optimizer",
    "load_scheduler",
    "save_model",
    "save_optimizer",
]

DESCRIPTION = "longmoe_checkpoint.json"  # marks a folder as ours; what is no tensor
_SCHEDULER = "scheduler.pt"
_OPTIMIZER = "optimizer"  # the folder of its tensors; the model's are beside its config, as `from_pretrained` wants
_FILE_BYTES = 2**30  # of one rank's file at most, or one tensor: this much is copied on the host while it is written
# How an optimizer computes belongs to the launch, not to the checkpoint.
_KERNEL = {"params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read, on some rank; the same message on all."""


def save_model(model: nn.Module, folder: Path) -> None:
    """
    Every rank writes its part of parameters and buffers, `shard-*.safetensors` in `folder`. A collective.

    Raises:
        `CheckpointError`: on all ranks, with what went wrong on which.
    """
    _save(lambda: get_model_state_dict(model), folder)


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Any]:
    """
    Every rank writes its part of the optimizer's tensors, under `folder`. A collective.

    Returns:
        What is no such tensor, for `describe`: `{"state": {parameter: {"step": 8.0}}, "groups": [{"lr": ...}],
        "group_of": {parameter: 0}}`, the same on all ranks. Another mesh may group parameters in another way.

    Raises:
        `CheckpointError`: on all ranks, with what went wrong on which.
    """
    rest: dict[str, Any] = {"state": {}, "groups": [], "group_of": {}}

    def tensors() -> dict[str, torch.Tensor]:
        found = {}
        loaded = get_optimizer_state_dict(model, optimizer)
        for name, values in loaded["state"].items():
            rest["state"][name] = {key: value for key, value in map(_plain, values.items()) if not _large(value)}
            found.update({f"{name}.{key}": value for key, value in values.items() if _large(value)})
        for number, group in enumerate(loaded["param_groups"]):
            rest["groups"].append(dict(_plain(item) for item in group.items() if item[0] not in _KERNEL))
            rest["group_of"].update(dict.fromkeys(group["params"], number))
        json.dumps(rest)  # here, so that all ranks hear of what cannot be written
        return found

    _save(tensors, folder / _OPTIMIZER)
    return rest


def describe(folder: Path, optimizer: dict[str, Any], **facts: Any) -> None:
    """Writes the file that says that `folder` is a sharded checkpoint, with what `save_optimizer` gave. One rank's."""
    text = json.dumps({"version": 1, **facts, "optimizer": optimizer}, indent=1)
    (folder / DESCRIPTION).write_text(text, encoding="utf-8")


def read_description(folder: Path) -> dict[str, Any] | None:
    """What `describe` has written; `None` of a folder that is no sharded checkpoint."""
    path = folder / DESCRIPTION
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def load_model(model: nn.Module, folder: Path) -> None:
    """
    Parameters and buffers in place, each rank its part, whatever ranks wrote them. A collective if there are ranks.

    Raises:
        `CheckpointError`: a tensor is missing, or has another shape.
    """
    _load(get_model_state_dict(model), folder)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> list[int]:
    """
    The state of a plain or a streaming AdamW, or another optimizer with a tensor for each parameter. A collective.

    It is read into the memory that the optimizer has, or takes by a step of nothing with a learning rate of 0.

    Returns:
        For each of the optimizer's groups the saved group that its options came from, for `load_scheduler`.

    Raises:
        `CheckpointError`: the checkpoint is one of other parameters or another optimizer.
    """
    what = f"read the checkpoint {folder}"
    template, into, rest = together(lambda: _template(model, optimizer, folder), what)
    _load(into, folder / _OPTIMIZER)
    came_from = []
    for number, group in enumerate(template["param_groups"]):
        came_from.append(rest["group_of"][group["params"][0]] if group["params"] else number)
        options = rest["groups"][came_from[-1]] if group["params"] else {}
        group.update({key: _like(options[key], value) for key, value in group.items() if key in options})
    together(lambda: set_optimizer_state_dict(model, optimizer, template), what)
    return came_from


def load_scheduler(scheduler: Any, folder: Path, came_from: list[int]) -> None:
    """
    The state of a learning rate scheduler, `scheduler.pt`, whose lists by group follow the optimizer's groups.

    Raises:
        `CheckpointError`: it cannot be read, or is another scheduler's.
    """

    def load() -> None:
        state = torch.load(folder / _SCHEDULER, weights_only=True)
        groups = len(state["base_lrs"]) if "base_lrs" in state else -1
        for key, value in state.items():
            if isinstance(value, list) and len(value) == groups:
                state[key] = [value[number] for number in came_from]
        scheduler.load_state_dict(state)

    together(load, f"read the checkpoint {folder}")


def _template(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> tuple[dict, dict, dict]:
    """The optimizer's state dict with all but large tensors filled in; those by their names; what `describe` wrote."""
    rest = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))["optimizer"]
    saved = HuggingFaceStorageReader(str(folder / _OPTIMIZER)).read_metadata().state_dict_metadata
    template = get_optimizer_state_dict(model, optimizer)
    if missing := {n for group in template["param_groups"] for n in group["params"]} - set(rest["group_of"]):
        raise ValueError(f"it has no optimizer state of {len(missing)} parameters, {min(missing)} among them")
    into = {}
    for name, values in template["state"].items():
        if name not in rest["state"]:  # it never had a gradient: at step 0, moments of 0 are what no moments are
            for value in values.values():
                value.zero_()
            continue
        for key, value in values.items():
            if not _large(value):
                values[key] = _like(rest["state"][name][key], value)
            elif key != "master" or f"{name}.{key}" in saved:  # a plain AdamW has none: it comes from the parameter
                into[f"{name}.{key}"] = value
        if "master" in values and f"{name}.master" not in into:
            del values["master"]
    return template, into, rest


# -- to and from torch.distributed.checkpoint ------------------------------------------------------------------------
def _save(tensors: Callable[[], dict[str, Any]], folder: Path) -> None:
    found: dict[str, Any] = {}

    def save() -> None:
        writer = HuggingFaceStorageWriter(str(folder), _files(found), save_distributed=True)
        checkpoint.save(found, storage_writer=writer)

    def gather() -> None:
        found.update({name: _rectangular(value) for name, value in tensors().items()})

    together(gather, "prepare a checkpoint")
    _by_torch(save, f"write a checkpoint into {folder.parent}")


def _load(into: dict[str, Any], folder: Path) -> None:
    rectangular = {name: _rectangular(value) for name, value in into.items()}
    reader = HuggingFaceStorageReader(str(folder))
    _by_torch(lambda: checkpoint.load(rectangular, storage_reader=reader), f"read the checkpoint {folder}")
    for name, value in into.items():
        if rectangular[name] is not value:
            value.copy_(rectangular[name].redistribute(placements=value.placements))


def _by_torch(work: Callable[[], None], what: str) -> None:
    """Its own collectives bring every rank's exceptions to all ranks: they become one message."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process, which is meant
            work()
    except CheckpointException as error:
        failures = {rank: wrapped[0] for rank, wrapped in sorted(error.failures.items())}
        raise CheckpointError(_message(what, {rank: _told(cause) for rank, cause in failures.items()})) from error


def together(work: Callable[[], Any], what: str) -> Any:
    """
    Does what needs no other rank, and waits for all to have done it: where one fails, all raise the same.

    Arguments:
        work: without a collective in it.
        what: for the message, "hf_longmoe could not {what}: rank 1: OSError: ...".

    Raises:
        `CheckpointError`: on all ranks.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    told = [None if error is None else _told(error)]
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        mine, told = told[0], [None] * distributed.get_world_size()
        distributed.all_gather_object(told, mine)
    if any(told):
        raise CheckpointError(_message(what, {rank: text for rank, text in enumerate(told) if text})) from error
    return result


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _message(what: str, told: dict[int, str]) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, text in told.items():
        by_text.setdefault(text, []).append(rank)
    causes = [f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {text}" for text, r in by_text.items()]
    return f"hf_longmoe could not {what}. {'; '.join(causes)}"


def _rectangular(value: Any) -> Any:
    """
    A tensor whose part on each rank is one rectangle of the whole. Fused weights under tensor parallelism are not.

    FSDP over expert or tensor parallelism is: then ranks of the second dimension divide what those of the first have.
    """
    if not isinstance(value, DTensor):
        return value
    factors = [getattr(placement, "split_factor", 1) for placement in value.placements]
    for at, (placement, factor) in enumerate(zip(value.placements, factors, strict=True)):
        if factor == 1:
            continue
        inner = 1
        for later, other in enumerate(value.placements[at + 1 :], start=at + 1):
            inner *= value.device_mesh.size(later) if other.is_shard(placement.dim) else 1
        if factor != inner:
            whole = [Shard(p.dim) if hasattr(p, "dim") else Replicate() for p in value.placements]
            return value.redistribute(placements=whole)
    return value


def _files(tensors: dict[str, Any]) -> dict[str, int]:
    """Which of a rank's files each tensor goes to, from 1; the same on all ranks."""
    index, room, files = 1, _FILE_BYTES, {}
    for name, value in tensors.items():
        nbytes = value.numel() * value.element_size()
        nbytes //= value.device_mesh.size() if isinstance(value, DTensor) else 1
        if nbytes > room and room < _FILE_BYTES:
            index, room = index + 1, _FILE_BYTES
        files[name], room = index, room - nbytes
    return files


def _large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (isinstance(value, DTensor) or value.dim() > 0)


def _plain(item: tuple[str, Any]) -> tuple[str, Any]:
    key, value = item
    return key, value.item() if isinstance(value, torch.Tensor) and not _large(value) else value


def _like(value: Any, template: Any) -> Any:
    if isinstance(template, torch.Tensor):
        return torch.tensor(value, dtype=template.dtype, device=template.device)
    return tuple(value) if isinstance(template, tuple) else value
