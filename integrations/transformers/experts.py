"""Experts modules and dense MLPs whose `forward` is one of our schedules. Found by interface, not by class."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MethodType

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from hf_longmoe.integrations.transformers.by_token import is_adapter, why_not_by_token
from hf_longmoe.integrations.transformers.own_blocks import own_block
from hf_longmoe.schedules.dispatch import (
    AdaptedMLP,
    Block,
    GatedMLP,
    LocalDispatch,
    LowRank,
    ModelKernel,
    Projection,
    TokenTiles,
    with_factors,
)
from hf_longmoe.schedules.numerics import autocast_dtype

__all__ = [
    "Adapters",
    "adapters_on",
    "block_name",
    "block_of",
    "drop_adapters",
    "hidden_of",
    "is_called_as_interface",
    "is_experts",
    "patch_experts",
    "patch_mlp",
    "replaced_schedules",
    "restore_forward",
    "runs_in_waves",
    "standing_in",
]


def is_experts(module: nn.Module) -> bool:
    """Whether `module` goes through Transformers' experts interface (`use_experts_implementation`)."""
    return hasattr(type(module), "_apply_gate") and "is_concatenated" in vars(module)


def block_name(name: str) -> str:
    """The name of what an experts module of this name stands in, whatever adapters wrap it."""
    return standing_in(name).rpartition(".")[0]


def standing_in(name: str) -> str:
    """The name that a module has without the adapters that wrap it."""
    return _WRAPPED.sub("", name)


def is_called_as_interface(module: nn.Module) -> bool:
    """Whether the module is called as `(hidden [T, H], index [T, k], weights [T, k])`, behind the interface or not."""
    own = own_block(module)
    return is_experts(module) if own is None else own.called_as_interface


def runs_in_waves(module: nn.Module) -> bool:
    """Whether a schedule knows how to run these experts: by the interface, or by an adapter for their class."""
    return is_experts(module) or own_block(module) is not None


def hidden_of(experts: nn.Module) -> int:
    """H, from the weights: the configs' names for it differ."""
    if (own := own_block(experts)) is not None:
        return own.hidden(experts)
    return experts.down_proj.shape[-1 if experts.is_transposed else -2]


_WRAPPED = re.compile(r"(\.(base_layer|original_module|modules_to_save\.[^.]+))+$")  # as PEFT names what it wraps

Adapters = Mapping[str, Sequence[LowRank]]
"""What an adapter library adds to the stacked weights of an experts module, by parameter name."""


def adapters_on(experts: nn.Module) -> Adapters:
    """What is added to these experts here and now: which adapters are active can change from call to call."""
    source: Callable[[], Adapters] | None = vars(experts).get("longmoe_adapters")
    return {} if source is None else source()


def block_of(
    experts: nn.Module, kernel: str, adapters: Adapters | None = None
) -> tuple[Block, tuple[torch.Tensor, ...]]:
    """
    How a wave of these experts runs, and the parameters it needs.

    Arguments:
        experts: an experts module.
        kernel: `DispatchConfig.kernel`.
        adapters: what is added to its weights; `adapters_on(experts)` if not given.
    """
    if (own := own_block(experts)) is not None:
        return own.block(experts)
    adapters = adapters_on(experts) if adapters is None else adapters
    named = dict(experts.named_parameters())
    standard = (
        experts.has_gate
        and experts.is_concatenated
        and not (experts.has_bias or experts.is_transposed or experts.has_post_expert_norm)
        and type(experts)._apply_gate is _default_apply_gate
        and set(named) == {"gate_up_proj", "down_proj"}
    )
    implementation = experts.config._experts_implementation
    # A kernel that somebody chose over the usual ones (one they registered, say) is theirs to keep.
    usual = implementation in ("eager", "grouped_mm", "batched_mm")
    # `grouped_mm` computes in the weights' dtype under autocast; the others in autocast's, which only they know how.
    cast = implementation != "grouped_mm" and autocast_dtype(experts.down_proj.device) is not None
    ours = kernel == "auto" and usual and not cast
    if adapters:
        return _adapted(experts, named, adapters, ours)
    if ours and standard:
        silu = isinstance(experts.act_fn, (nn.SiLU, SiLUActivation))
        return GatedMLP(experts.act_fn, silu), (experts.gate_up_proj, experts.down_proj)
    return _model_kernel(experts, named), tuple(named.values())


def _model_kernel(experts: nn.Module, named: Mapping[str, torch.Tensor]) -> ModelKernel:
    stacked = tuple("." not in name and p.shape[0] == experts.num_experts for name, p in named.items())
    own_gate = experts.has_gate and type(experts)._apply_gate is not _default_apply_gate
    gathers = experts.config._experts_implementation == "batched_mm"
    return ModelKernel(experts, tuple(named), stacked, own_gate, gathers_weights=gathers)


def _adapted(
    experts: nn.Module, named: Mapping[str, torch.Tensor], adapters: Adapters, ours: bool
) -> tuple[Block, tuple[torch.Tensor, ...]]:
    """As `block_of`, with what is added. What `grouped_mm` does of itself, for any experts without a norm, is ours."""
    names, transposed = tuple(named), experts.is_transposed
    low_rank, params = with_factors(names, tuple(named.values()), adapters, transposed)
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    biases = {f"{up}_bias", "down_proj_bias"} if experts.has_bias else set()
    if not ours or experts.has_post_expert_norm or set(names) != {up, "down_proj"} | biases:
        kernel = _model_kernel(experts, named)
        stacked = kernel.stacked + (True,) * (len(params) - len(names))
        return replace(kernel, stacked=stacked, low_rank=low_rank), params

    def projection(name: str) -> Projection:
        place = names.index(name)
        bias = names.index(f"{name}_bias") if biases else None
        return Projection(place, transposed, bias, tuple(f for f in low_rank if f.weight == place))

    gate = experts._apply_gate if experts.has_gate else experts.act_fn
    return AdaptedMLP(gate, projection(up), projection("down_proj"), len(params)), params


def patch_experts(experts: nn.Module, schedule: LocalDispatch, kernel: str) -> None:
    # A method, not a closure: copy.deepcopy(model) then binds the copy's experts, not these.
    experts.longmoe_schedule, experts.longmoe_kernel = schedule, kernel
    experts.forward = MethodType(_experts_forward, experts)


def patch_mlp(mlp: nn.Module, tiles: TokenTiles) -> None:
    mlp.longmoe_schedule = tiles
    mlp.forward = MethodType(_mlp_forward, mlp)


def replaced_schedules(model: nn.Module) -> Iterator[str]:
    """Names of patched modules whose `forward` somebody has replaced since; a wrapper around it does not count."""
    ours = {_experts_forward, _mlp_forward}
    for name, module in model.named_modules():
        if "longmoe_schedule" in vars(module) and "longmoe_ep_forward" not in vars(module):
            forward = vars(module).get("forward")
            while forward is not None and getattr(forward, "__func__", forward) not in ours:
                forward = getattr(forward, "__wrapped__", None)
            if forward is None:
                yield name


def drop_adapters(experts: nn.Module) -> None:
    """Has an adapter library run what it has put on these experts itself again."""
    if (adapters := vars(experts).pop("longmoe_adapters", None)) is not None:
        adapters.remove()


def restore_forward(module: nn.Module) -> None:
    drop_adapters(module)
    for name in ("forward", "longmoe_schedule", "longmoe_kernel"):
        vars(module).pop(name, None)


@torch.compiler.disable
def _experts_forward(self: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    """Called as `(hidden [T, H], index [T, k], weights [T, k])`; a block of its own, as its class is."""
    own = own_block(self)
    # An adapter on the weights, put on after the patch.
    if parametrize.is_parametrized(self) or own is not None and any(map(is_adapter, self.modules())):
        return type(self).forward(self, *args)
    block, params = block_of(self, self.longmoe_kernel)

    def run(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # The replay's function mode looks for the router's top-k; nothing in here is its business.
        with torch._C.DisableTorchFunction():
            return self.longmoe_schedule(hidden, index, weights, block, params)

    return run(*args) if own is None else own.forward(self, run, *args)


@torch.compiler.disable
def _mlp_forward(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    if why_not_by_token(self, now=True):  # an adapter that was put on after the patch, say
        return type(self).forward(self, hidden_states)
    with torch._C.DisableTorchFunction():
        return self.longmoe_schedule(self, hidden_states)
