"""MoE blocks outside of Transformers' experts interface, each brought to the schedules by a small adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from hf_longmoe.integrations.transformers.by_token import is_adapter
from hf_longmoe.schedules.dispatch import Block, GatedMLP, ModelKernel

__all__ = ["OwnBlock", "ReplacedForward", "own_block"]

Params = tuple[torch.Tensor, ...]
# (hidden [T, H], index [T, k], weights [T, k]) -> [T, H]: the schedule, as the experts interface would call it.
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class OwnBlock:
    """
    What the schedules need of one class of experts.

    Arguments:
        block: (experts) -> how a wave runs, and the stacked parameters it needs.
        hidden: (experts) -> H.
        forward: (experts, run, *its own arguments) -> what its own forward returns, with the experts run by `run`.
        parent: the forward of what the experts stand in, where that is part of how they are dispatched.
    """

    block: Callable[[nn.Module], tuple[Block, Params]]
    hidden: Callable[[nn.Module], int]
    forward: Callable[..., torch.Tensor]
    parent: Callable[..., Any] | None = None

    @property
    def called_as_interface(self) -> bool:
        """Whether its own forward takes and returns what one behind the experts interface does."""
        return self.forward is _as_called and self.parent is None


class ReplacedForward:
    """A forward of our own on a module, until `remove`."""

    def __init__(self, module: nn.Module, forward: Callable) -> None:
        self.module = module
        module.forward = MethodType(forward, module)

    def remove(self) -> None:
        vars(self.module).pop("forward", None)


def own_block(module: nn.Module) -> OwnBlock | None:
    """The adapter of Transformers' own class of this name; code from elsewhere may mean something else by it."""
    kind = next(base for base in type(module).__mro__ if not base.__module__.startswith("torch."))
    return _OWN.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None


def _silu(act: Callable) -> bool:
    return isinstance(act, (nn.SiLU, SiLUActivation))


def _as_called(experts: nn.Module, run: Run, *args: torch.Tensor) -> torch.Tensor:
    return run(*args)


# -- step3p7: the standard layout; its gate clamps after the activation ----------------------------------------------
def _step3p7(experts: nn.Module) -> tuple[Block, Params]:
    names = ("gate_up_proj", "down_proj")
    return ModelKernel(experts, names, (True, True), own_gate=True), (experts.gate_up_proj, experts.down_proj)


# -- dbrx: three flat matrices [E * I, H] ----------------------------------------------------------------------------
def _dbrx(experts: nn.Module) -> tuple[Block, Params]:
    mlp, shape = experts.mlp, (experts.num_experts, experts.ffn_hidden_size, experts.hidden_size)
    gate, up, down = (weight.view(shape) for weight in (mlp.w1, mlp.v1, mlp.w2))
    act = mlp.activation_fn
    return GatedMLP(act, _silu(act), fused=False), (gate, up, down.transpose(1, 2))


def _dbrx_forward(
    experts: nn.Module, run: Run, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return run(hidden.reshape(-1, hidden.shape[-1]), index, weights).view(hidden.shape)


# -- llama4: every expert on every token, inputs scaled by the routing weights, which are zero but for the top k -----
def _llama4(experts: nn.Module) -> tuple[Block, Params]:
    gate_up, down = experts.gate_up_proj.transpose(1, 2), experts.down_proj.transpose(1, 2)
    return GatedMLP(experts.act_fn, _silu(experts.act_fn)), (gate_up, down)


def _llama4_forward(
    experts: nn.Module,
    run: Run,
    hidden: torch.Tensor,
    index: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """A row is a token of its own here, `[T * k, H]`: its weight is in its input (k is 1 in all models there are)."""
    if index is None:  # by the stock block
        return type(experts).forward(experts, hidden)
    rows = (hidden.unsqueeze(1) * weights.unsqueeze(2)).flatten(0, 1)
    index = index.reshape(-1, 1)
    return run(rows, index, torch.ones_like(index, dtype=rows.dtype)).view(*weights.shape, -1).sum(1)


def _llama4_block(block: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An expert of a zero input gives zero, and zero gradients: those not chosen need not run."""
    if is_adapter(block.experts):  # put on after the patch: the experts then run as they are
        return type(block).forward(block, hidden_states)
    hidden = hidden_states.reshape(-1, block.hidden_dim)
    scores, logits = block.router(hidden)
    index = scores.detach().topk(block.top_k, dim=1).indices
    routed = block.experts(hidden, index, scores.gather(1, index))
    return block.shared_expert(hidden) + routed, logits


# -- jetmoe: rows sorted by its router -------------------------------------------------------------------------------
def _jetmoe(moe: nn.Module) -> tuple[Block, Params]:
    act = moe.activation
    return GatedMLP(act, _silu(act)), (moe.input_linear.weight, moe.output_linear.weight)


def _jetmoe_forward(moe: nn.Module, run: Run, layer_input: torch.Tensor) -> torch.Tensor:
    hidden = layer_input.reshape(-1, moe.input_size)
    order, _, gates, counts, _ = moe.router(hidden)
    experts = torch.arange(len(counts), device=order.device)
    experts = experts.repeat_interleave(torch.tensor(counts, device=order.device), output_size=len(order))
    index = torch.empty_like(order).scatter_(0, order, experts)
    weights = torch.zeros_like(gates).index_copy(0, order, gates)
    k = moe.router.top_k
    return (run(hidden, index.view(-1, k), weights.view(-1, k)) + moe.bias).view(layer_input.shape)


# -- longcat_flash: beyond the routed experts, some that give back their input ---------------------------------------
def _longcat(experts: nn.Module) -> tuple[Block, Params]:
    return GatedMLP(experts.act_fn, _silu(experts.act_fn)), (experts.gate_up_proj, experts.down_proj)


def _longcat_forward(
    experts: nn.Module, run: Run, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    identity = index >= experts.num_routed_experts
    given_back = (weights * identity).sum(1, keepdim=True)
    # What is beyond all stacked weights is no expert's.
    routed = run(hidden, index.masked_fill(identity, experts.total_experts), weights)
    return routed + (hidden * given_back).to(hidden.dtype)


_OWN: dict[str, OwnBlock] = {
    "DbrxExperts": OwnBlock(_dbrx, lambda experts: experts.hidden_size, _dbrx_forward),
    "JetMoeMoE": OwnBlock(_jetmoe, lambda moe: moe.input_size, _jetmoe_forward),
    "Llama4TextExperts": OwnBlock(_llama4, lambda experts: experts.hidden_size, _llama4_forward, _llama4_block),
    "LongcatFlashExperts": OwnBlock(_longcat, lambda experts: experts.hidden_size, _longcat_forward),
    "Step3p7Experts": OwnBlock(_step3p7, lambda experts: experts.hidden_dim, _as_called),
}
