"""An LM head that FSDP2 divides over the data ranks and that no rank ever gathers: Ring-DTP under Transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_longmoe.integrations.transformers.deferred import current_call, defer
from hf_longmoe.integrations.transformers.experts import standing_in
from hf_longmoe.schedules.vocab import ring_cross_entropy
from hf_longmoe.schedules.wire import GroupWire

__all__ = [
    "FREE",
    "Ring",
    "divide_head",
    "gather_parts",
    "gathered_until_backward",
    "keeps_gathered",
    "ring_of",
    "stand_in",
    "why_no_ring",
]

FREE = 'fsdp_plan={"lm_head": "free_full_weight"}'


@dataclass(frozen=True)
class Ring:
    """
    The ranks that share a head's weight.

    Arguments:
        wire: over the data ranks that hold different parts.
        replicas: the group of the ranks that hold the same part (HSDP), if there are several.
        data_ranks: all of them: FSDP2's gradients are the mean over these.
    """

    wire: GroupWire
    replicas: Any
    data_ranks: int

    def loss(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels, **options: Any):
        """`weight`, `bias`: this rank's parts."""
        if self.replicas is not None:
            weight = _SumOverReplicas.apply(weight, self.replicas)
            bias = None if bias is None else _SumOverReplicas.apply(bias, self.replicas)
        options |= {"bias": bias, "weight_scale": 1 / self.data_ranks}
        return ring_cross_entropy(hidden, weight, labels, wire=self.wire, **options)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter of which each rank has a part; its gradient goes back as FSDP2's does."""
        return _Gather.apply(part, self)


def why_no_ring(model: PreTrainedModel, lm_head: nn.Module) -> str | None:
    """Why the head's weight cannot stay divided; `None` if it can."""
    if not isinstance(lm_head.weight, DTensor):
        return "its weight is not divided over ranks (FSDP2 through DistributedConfig does that)"
    meshes = getattr(model, "_mesh_manager", None)
    if meshes is not None and meshes.get_mesh("tp").size() > 1:
        return "tensor parallelism divides it, over ranks that have the same tokens"
    if lm_head.weight.device_mesh.size() == 1:
        return "there is one data rank"
    if model.get_input_embeddings().weight is lm_head.weight:
        return "it is tied to the input embeddings, which gather it"
    if meshes is None and not vars(lm_head).get("longmoe_divided"):
        return "Accelerate's FSDP2 gathers it together with the last norm; LongMoEPlugin keeps it divided"
    if meshes is not None and (not isinstance(lm_head, FSDPModule) or _style(model, lm_head) != "free_full_weight"):
        return f"FSDP2 gathers it together with the last norm; load with {FREE} to keep it divided"
    return None


def gathered_until_backward(model: PreTrainedModel, lm_head: nn.Module) -> bool:
    """Whether FSDP2 of Transformers keeps the gathered weight from the head's forward to its backward."""
    return getattr(model, "_mesh_manager", None) is not None and _style(model, lm_head) == "keep_full_weight"


def keeps_gathered(lm_head: nn.Module) -> bool:
    """The same of a head that Accelerate has given to FSDP2, which it does after `patch_model`, perhaps."""
    group = lm_head._get_fsdp_state()._fsdp_param_group if isinstance(lm_head, FSDPModule) else None
    return group is not None and not group._reshard_after_forward


def divide_head(lm_head: nn.Module, **options: Any) -> dict[nn.Parameter, nn.Parameter]:
    """
    Gives the head a group of its own in FSDP2, as `fsdp_plan` does in Transformers, before Accelerate shards the rest.

    Arguments:
        options: of `fully_shard`.

    Returns:
        Its parameters now, by those before.
    """
    before = dict(lm_head.named_parameters())
    fully_shard(lm_head, **options)
    lm_head.longmoe_divided = True
    return {before[name]: param for name, param in lm_head.named_parameters()}


def _style(model: PreTrainedModel, lm_head: nn.Module) -> str | None:
    name = next((name for name, module in model.named_modules() if module is lm_head), None)
    return (model.fsdp_plan or {}).get(name if name is None else standing_in(name))


def ring_of(lm_head: nn.Module) -> Ring:
    """By how the weight is placed: divided along one dimension of its mesh, and with HSDP repeated along another."""
    mesh, placements = lm_head.weight.device_mesh, lm_head.weight.placements
    (divided,) = (dim for dim, placement in enumerate(placements) if placement.is_shard())
    repeated = [dim for dim, placement in enumerate(placements) if placement.is_replicate() and mesh.size(dim) > 1]
    replicas = mesh.get_group(repeated[0]) if repeated else None
    return Ring(GroupWire(mesh.get_group(divided)), replicas, mesh.size())


class _StandIn(nn.Module):
    """In the head's place while a loss is computed: FSDP2's hooks, which gather the weight, are on the head itself."""

    def __init__(self, lm_head: nn.Module, ring: Ring) -> None:
        super().__init__()
        vars(self)["lm_head"] = lm_head  # not as a child: no parameter may be found twice
        self.ring = ring

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["lm_head"], name)

    @torch.compiler.disable
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight, bias = self.lm_head.weight, self.lm_head.bias
        parts = weight.to_local(), None if bias is None else bias.to_local()
        return defer(current_call(), hidden_states, *parts, ring=self.ring, vocab_size=weight.shape[0])


@contextlib.contextmanager
def stand_in(model: PreTrainedModel, name: str, ring: Ring | None) -> Iterator[None]:
    """Inside, the head called `name` is one that gathers nothing; without a ring nothing changes."""
    if ring is None:
        yield
        return
    parent, child = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    lm_head = parent._modules[child]
    parent._modules[child] = _StandIn(lm_head, ring)
    try:
        yield
    finally:
        parent._modules[child] = lm_head


class _SumOverReplicas(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        return part.view_as(part)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # another may hold what came
        distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


def gather_parts(part: torch.Tensor, wire: GroupWire) -> tuple[torch.Tensor, list[int]]:
    """The whole of a parameter of which each rank has a part, outside of any graph; and the rows of each part."""
    rows = [rows for (rows,) in wire.gather(torch.tensor([len(part)], device=part.device))]
    sent = part.repeat(wire.size, *[1] * (part.dim() - 1))  # every part to every rank
    return wire.exchange(sent, rows, [len(part)] * wire.size).wait(), rows


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, ring: Ring):
        ctx.ring = ring
        whole, ctx.rows = gather_parts(part, ring.wire)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        wire, own = ctx.ring.wire, ctx.rows[ctx.ring.wire.rank]
        parts = wire.exchange(gradient.contiguous(), [own] * wire.size, ctx.rows).wait()
        mean = parts.view(wire.size, own, *parts.shape[1:]).sum(0) / ctx.ring.data_ranks
        if ctx.ring.replicas is not None:
            distributed.all_reduce(mean, group=ctx.ring.replicas)
        return mean, None
