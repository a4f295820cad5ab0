"""Tells checkpointed layers which top-k is a router's: its choice is kept for the replay. By hooks on MoE blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longmoe.integrations.transformers.experts import block_name, runs_in_waves
from hf_longmoe.schedules.replay import pin_top_k

__all__ = ["pin_routing"]


def pin_routing(model: nn.Module) -> Iterator[Any]:
    """Has checkpointed layers keep the routers' top-k, and no other (a sparse attention's). Handles undo it."""
    for module in _routing_modules(model):
        yield module.register_forward_pre_hook(_pin)
        yield module.register_forward_hook(_unpin)


def _routing_modules(model: nn.Module) -> set[nn.Module]:
    """MoE blocks: what experts stand in. Where that is the whole layer, the routers beside them."""
    found = set()
    for name, module in model.named_modules():
        if runs_in_waves(module):
            block = model.get_submodule(block_name(name))
            if isinstance(block, GradientCheckpointingLayer):
                beside = (*block.named_children(), *module.named_children())
                found |= {m for child, m in beside if "router" in child or "gate" in child}
            else:
                found.add(block)
    return found


def _pin(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        pin_top_k(True)


def _unpin(module: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        pin_top_k(False)
