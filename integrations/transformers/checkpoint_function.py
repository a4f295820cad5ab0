"""The one place where a model's activation checkpointing is wrapped: by `patch_model` and by SCO, each or both.

`PreTrainedModel._set_gradient_checkpointing` is where each way of switching checkpointing on ends, the Trainer's
inside `train()` included; it hands each layer the function to checkpoint with. FSDP2 by Accelerate has another way,
torch's `CheckpointWrapper`. Both functions are wrapped here, and asked for what to do at each call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_longmoe.peaks.region import tag
from hf_longmoe.schedules.boundaries import BoundaryOffload
from hf_longmoe.schedules.replay import checkpoint_once

__all__ = [
    "Checkpointing",
    "Observed",
    "check_exclusive",
    "checkpoint_functions",
    "checkpointing_of",
    "wrap_checkpointing",
]

_PLACES = ("_gradient_checkpointing_func", "checkpoint_fn")  # of a layer, of a CheckpointWrapper
_TWICE = (
    "{what} moves activations to the host, and so does LongMoEPlugin with `boundaries`; use one of them: switch that"
    " off, or give the plugin LongMoEConfig(boundaries=None)."
)


@dataclass(eq=False)
class Checkpointing:
    """
    What every checkpointed call of a model does beside checkpointing.

    Arguments:
        replay: its layers know which pass they are in, see `schedules/replay.py`. Set by `patch_model`.
        offload: their inputs wait in host memory. Set by `LongMoEPlugin`.
        exclusive: another offloading of activations is refused, since SCO was asked for.
        shared: as `replay`, for attention over ranks that share sequences. Set by `SharedSequences`.
    """

    replay: bool = False
    offload: BoundaryOffload | None = None
    exclusive: bool = False
    shared: bool = False

    def __reduce__(self) -> tuple:
        """Of a model that is copied, or saved whole: a plugin's is on the one model that was prepared with it."""
        return Checkpointing, (self.replay,)


def checkpointing_of(model: PreTrainedModel) -> Checkpointing:
    """The model's, made on first use. After a change: `wrap_checkpointing`."""
    found = vars(model).get("longmoe_checkpointing")
    return Checkpointing() if found is None else found


def wrap_checkpointing(model: PreTrainedModel, settings: Checkpointing) -> None:
    """
    Has the model's checkpointing, as it is and as it will be switched on, do what `settings` say; where they say
    nothing, it is what it was before. May be called again: layers may have been wrapped by somebody since.

    Raises:
        `ValueError`: `settings.exclusive`, and Transformers' own offloading is on; nothing is changed then.
    """
    wanted = settings.replay or settings.exclusive or settings.shared
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if settings.exclusive:
        check_exclusive(model)
    for module, place in checkpoint_functions(model):
        observed = vars(module)[place]
        function = _bare(observed)
        function = _Wrapped(function, settings) if wanted else function
        if isinstance(observed, Observed):
            observed.function = function
        else:
            setattr(module, place, function)
    for module in models:
        if not _is_old(module):
            vars(module).pop("_set_gradient_checkpointing", None)
            vars(module).pop("longmoe_checkpointing", None)
            if wanted:
                module.longmoe_checkpointing = settings
                module._set_gradient_checkpointing = MethodType(_set_gradient_checkpointing, module)


def check_exclusive(model: PreTrainedModel) -> None:
    """
    Raises:
        `ValueError`: SCO cannot be put into the model's checkpointing, or Transformers' own offloading is on.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _is_old(module):
            raise ValueError(
                f"LongMoEPlugin: {type(module).__name__} has checkpointing in the format of Transformers 4.34 and"
                " before, into which `boundaries` cannot be put; give LongMoEConfig(boundaries=None)."
            )
    for module, place in checkpoint_functions(model):
        _refuse_own_offload(_bare(vars(module)[place]))


class Observed:
    """
    A checkpoint function with a watcher around it, which stays outermost.

    Arguments:
        around: makes of a region the one to run.
    """

    def __init__(self, function: Callable, around: Callable[[Callable], Callable]) -> None:
        self.function, self.around = function, around

    def __call__(self, region: Callable, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.around(region), *args, **kwargs)


class _Wrapped:
    """A checkpoint function, with what `settings` say around it."""

    def __init__(self, function: Callable, settings: Checkpointing) -> None:
        self.function, self.settings = function, settings

    def __call__(self, region: Callable, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a compiled layer's recompute is the compiler's own affair
            return self.function(region, *args, **kwargs)
        replay, offload = self.settings.replay or self.settings.shared, self.settings.offload
        if self.settings.exclusive:
            _refuse_offload_around()
        if replay:
            # What a layer keeps from its forward to its replay is counted with its input, and goes with it.
            store = None if offload is None else offload.store
            region = checkpoint_once(region, partial(tag, "boundaries"), store)
        if offload is None:
            return self.function(region, *args, **kwargs)
        return offload.checkpoint(self.function, region, *args, **kwargs)


@wraps(PreTrainedModel._set_gradient_checkpointing)
def _set_gradient_checkpointing(
    self: PreTrainedModel, enable: bool = True, gradient_checkpointing_func: Callable = checkpoint, **kwargs: Any
) -> None:
    function, settings = _bare(gradient_checkpointing_func), self.longmoe_checkpointing
    if enable and settings.exclusive:
        _refuse_own_offload(function)
    type(self)._set_gradient_checkpointing(self, enable, _Wrapped(function, settings), **kwargs)


def checkpoint_functions(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules that checkpoint, and the attribute that holds the function."""
    for module in model.modules():
        if "_gradient_checkpointing_func" in vars(module):
            yield module, _PLACES[0]
        if isinstance(module, CheckpointWrapper):
            yield module, _PLACES[1]


def _bare(function: Callable) -> Callable:
    while isinstance(function, (_Wrapped, Observed)):
        function = function.function
    return function


def _is_old(model: PreTrainedModel) -> bool:
    return "value" in inspect.signature(type(model)._set_gradient_checkpointing).parameters


def _refuse_own_offload(function: Callable) -> None:
    name = getattr(getattr(function, "func", function), "__qualname__", "")
    if name.endswith("_activation_checkpointing_enable.<locals>.checkpoint_func"):  # its `offload=True`
        raise ValueError(_TWICE.format(what="activation_checkpointing_enable(offload=True)"))


def _refuse_offload_around() -> None:
    """Of Accelerate (`activation_checkpointing_offload`), TRL (`activation_offloading`), or the user's own."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack = None if hooks is None else hooks[0]
    name, module = getattr(pack, "__qualname__", ""), getattr(pack, "__module__", None) or ""
    if name.startswith("save_on_cpu.") or module.startswith("trl."):
        what = "TRL's activation_offloading" if module.startswith("trl.") else "torch.autograd.graph.save_on_cpu"
        raise ValueError(_TWICE.format(what=f"{what}, which is around this layer,"))
