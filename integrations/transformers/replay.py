"""Makes every checkpointed layer of a model know its replay: pinned top-k, and experts that need not run again.

`PreTrainedModel._set_gradient_checkpointing` is where each way of switching checkpointing on ends, the Trainer's
inside `train()` included; it hands each layer the function to checkpoint with. That function is wrapped here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_longmoe.schedules.replay import checkpoint_once

__all__ = ["patch_checkpointing", "restore_checkpointing"]


class _KnowsReplay:
    """A checkpoint function whose regions know which pass they are in."""

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __call__(self, region: Callable, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a compiled layer's recompute is the compiler's own affair
            return self.function(region, *args, **kwargs)
        return self.function(checkpoint_once(region), *args, **kwargs)


@wraps(PreTrainedModel._set_gradient_checkpointing)
def _set_gradient_checkpointing(
    self: PreTrainedModel, enable: bool = True, gradient_checkpointing_func: Callable = checkpoint, **kwargs: Any
) -> None:
    if not isinstance(gradient_checkpointing_func, _KnowsReplay):
        gradient_checkpointing_func = _KnowsReplay(gradient_checkpointing_func)
    type(self)._set_gradient_checkpointing(self, enable, gradient_checkpointing_func, **kwargs)


def patch_checkpointing(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module._set_gradient_checkpointing = MethodType(_set_gradient_checkpointing, module)
        if "_gradient_checkpointing_func" in vars(module):
            module._gradient_checkpointing_func = _KnowsReplay(module._gradient_checkpointing_func)


def restore_checkpointing(model: nn.Module) -> None:
    for module in model.modules():
        vars(module).pop("_set_gradient_checkpointing", None)
        function = vars(module).get("_gradient_checkpointing_func")
        if isinstance(function, _KnowsReplay):
            module._gradient_checkpointing_func = function.function
