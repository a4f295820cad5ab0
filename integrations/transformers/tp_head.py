"""An LM head that tensor parallelism divides: every rank of the group has the same tokens and a part of the weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_longmoe.integrations.transformers.ring_head import gather_parts
from hf_longmoe.schedules.vocab import ring_cross_entropy
from hf_longmoe.schedules.wire import GroupWire

__all__ = ["Divided", "divided_of", "is_divided", "stock_forward"]

_STYLE = "colwise_gather_output"


@dataclass(frozen=True)
class Divided:
    """
    The ranks that share a head's weight and compute one batch together. Its schedule reduces sums where Transformers
    gathers the logits.

    Arguments:
        wire: over the tensor-parallel group.
    """

    wire: GroupWire

    def loss(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels, **options: Any):
        """`weight`, `bias`: this rank's parts."""
        return ring_cross_entropy(hidden, weight, labels, bias=bias, wire=self.wire, same_tokens=True, **options)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter of which each rank has a part."""
        return _Gather.apply(part, self.wire)


def is_divided(model: PreTrainedModel, lm_head: nn.Module) -> bool:
    meshes = getattr(model, "_mesh_manager", None)
    if meshes is None or meshes.get_mesh("tp").size() == 1 or not isinstance(lm_head.weight, DTensor):
        return False
    name = next((name for name, module in model.named_modules() if module is lm_head), None)
    return (model.tp_plan or {}).get(name) == _STYLE


def stock_forward(lm_head: nn.Module) -> Any:
    """What Transformers has put in the place of a divided head's forward, or `None`."""
    forward = vars(lm_head).get("forward")
    return forward if getattr(forward, "__module__", "") == "transformers.distributed.tensor_parallel" else None


def divided_of(model: PreTrainedModel) -> Divided:
    return Divided(GroupWire(model._mesh_manager.get_mesh("tp").get_group()))


class _Gather(torch.autograd.Function):
    """Every rank computes the same from the whole, and so has the whole gradient: its part of it goes back."""

    @staticmethod
    def forward(ctx, part, wire: GroupWire):
        whole, ctx.rows = gather_parts(part, wire)
        ctx.rank = wire.rank
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient.split(ctx.rows)[ctx.rank].contiguous(), None
