"""Makes every checkpointed layer of a model know its replay: pinned top-k, and experts that need not run again.

`PreTrainedModel._set_gradient_checkpointing` is where each way of switching checkpointing on ends, the Trainer's
inside `train()` included; it hands each layer the function to checkpoint with. That function is wrapped here. Which
top-k is the router's is told by hooks on MoE blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longmoe.integrations.transformers.experts import is_experts
from hf_longmoe.peaks.region import tag
from hf_longmoe.schedules.replay import checkpoint_once, pin_top_k

__all__ = ["patch_checkpointing", "pin_routing", "restore_checkpointing"]


class _KnowsReplay:
    """A checkpoint function whose regions know which pass they are in."""

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __call__(self, region: Callable, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a compiled layer's recompute is the compiler's own affair
            return self.function(region, *args, **kwargs)
        # What a layer keeps from its forward to its replay is counted with its input.
        return self.function(checkpoint_once(region, partial(tag, "boundaries")), *args, **kwargs)


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


def pin_routing(model: nn.Module) -> Iterator[Any]:
    """Has checkpointed layers keep the routers' top-k, and no other (a sparse attention's). Handles undo it."""
    for module in _routing_modules(model):
        yield module.register_forward_pre_hook(_pin)
        yield module.register_forward_hook(_unpin)


def _routing_modules(model: nn.Module) -> set[nn.Module]:
    """MoE blocks: what experts stand in. Where that is the whole layer, the routers beside them."""
    found = set()
    for name, module in model.named_modules():
        if is_experts(module):
            block = model.get_submodule(name.rpartition(".")[0])
            if isinstance(block, GradientCheckpointingLayer):
                found |= {m for child, m in block.named_children() if "router" in child or "gate" in child}
            else:
                found.add(block)
    return found


def _pin(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        pin_top_k(True)


def _unpin(module: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        pin_top_k(False)
