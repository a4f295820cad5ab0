"""LoRA's factors of experts that Transformers' expert parallelism divides: each rank's part, its gradient, the whole.

PEFT makes the factors of all experts on every rank, as plain tensors, and a Trainer averages their gradients. Divided
by `shard_adapters`, a rank holds those of its own experts: DTensors on the experts' mesh, of the shape that PEFT
knows, so that clipping, optimizers, checkpoints and `save_pretrained` treat them like the experts' own weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import distributed, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel

__all__ = ["ExpertRanks", "divide", "expert_ranks"]


@dataclass(frozen=True)
class ExpertRanks:
    """
    How the experts of a model are divided.

    Arguments:
        rank, size: this rank's place among those that the experts are divided over.
        copies: groups of ranks that hold the same experts.
        data_ranks: all of them: gradients are the mean over these. (Under tensor parallelism PEFT puts no LoRA on
            experts.)
    """

    rank: int
    size: int
    copies: tuple[Any, ...]
    data_ranks: int

    def part(self, weight: torch.Tensor, experts: int, last: bool) -> torch.Tensor:
        """
        A factor's part for this rank's experts, differentiable. Its gradient becomes the mean over the data ranks:
        here if the factor is divided, else once the whole is averaged over all ranks, as a Trainer does.

        Arguments:
            weight: PEFT's A `[r * E, in]` or B `[out, r * E]`.
            experts: E, of all ranks.
            last: the experts come last in their dimension (B), not first.

        Returns:
            `[r * E / size, in]` or `[out, r * E / size]`.
        """
        if isinstance(weight, DTensor):
            return _Mean.apply(weight.to_local(), self.copies, self.data_ranks)
        return self.slice(weight, experts, last)

    def slice(self, whole: torch.Tensor, experts: int, last: bool) -> torch.Tensor:
        count = experts // self.size
        home = slice(self.rank * count, (self.rank + 1) * count)
        if last:
            return whole.reshape(whole.shape[0], -1, experts)[:, :, home].reshape(whole.shape[0], -1)
        return whole.reshape(experts, -1, whole.shape[1])[home].reshape(-1, whole.shape[1])


def expert_ranks(model: PreTrainedModel) -> ExpertRanks:
    """Of a model that was loaded with `DistributedConfig(ep_size=...)`."""
    meshes, sharding = model._mesh_manager, model.config.distributed_config
    copies = [meshes.get_mesh("efsdp")]
    if sharding.dp_replicate_size > 1:
        copies.append(meshes.get_mesh("dp_replicate"))
    groups = tuple(mesh.get_group() for mesh in copies if mesh.size() > 1)
    ep = meshes.get_mesh("ep")
    return ExpertRanks(ep.get_local_rank(), ep.size(), groups, sharding.dp_size)


def divide(wrapper: ParamWrapper, adapter: str, mesh: DeviceMesh, ranks: ExpertRanks) -> None:
    """Replaces an adapter's factors by this rank's part of the first rank's; `mesh`: of the experts' own weights."""
    for factor, last in ((wrapper.lora_A[adapter], False), (wrapper.lora_B[adapter], True)):
        weight = factor.weight
        if isinstance(weight, DTensor):
            continue
        distributed.broadcast(weight.data, src=0)  # each rank has drawn its own
        # B's experts are its fastest index: a rank has every E-th block of its columns.
        by_expert = _StridedShard(1, split_factor=wrapper.r[adapter]) if last else Shard(0)
        layout = _Layout(ranks, wrapper.num_experts, last, mesh, by_expert, weight.shape, weight.stride())
        factor.weight = nn.Parameter(layout.divided(weight.data), requires_grad=weight.requires_grad)
        factor.register_load_state_dict_pre_hook(partial(layout.take_whole))


@dataclass(frozen=True)
class _Layout:
    ranks: ExpertRanks
    experts: int
    last: bool
    mesh: DeviceMesh
    by_expert: Any
    shape: torch.Size
    stride: tuple[int, ...]

    def divided(self, whole: torch.Tensor) -> DTensor:
        placements = [self.by_expert if name == "ep" else Replicate() for name in self.mesh.mesh_dim_names]
        part = self.ranks.slice(whole, self.experts, self.last).contiguous().clone()
        return DTensor.from_local(part, self.mesh, placements, run_check=False, shape=self.shape, stride=self.stride)

    def take_whole(self, factor: nn.Module, state: dict, prefix: str, *_: Any) -> None:
        found = state.get(f"{prefix}weight")
        if found is not None and not isinstance(found, DTensor):
            state[f"{prefix}weight"] = self.divided(found.to(factor.weight.device))


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, groups, divisor):
        ctx.groups, ctx.divisor = groups, divisor
        return part.view_as(part)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        gradient = gradient.contiguous() / ctx.divisor
        for group in ctx.groups:
            distributed.all_reduce(gradient, group=group)
        return gradient, None, None
