"""What `patch_model` does to experts, shared experts, dense MLPs and routers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longmoe.integrations.transformers.adapters import adapters_of
from hf_longmoe.integrations.transformers.entry import Action, Entry
from hf_longmoe.integrations.transformers.expert_parallel import (
    ExpertSettings,
    ep_note,
    install,
    is_expert_parallel,
    why_not,
)
from hf_longmoe.integrations.transformers.experts import (
    block_name,
    block_of,
    hidden_of,
    is_experts,
    patch_experts,
    patch_mlp,
    runs_in_waves,
)
from hf_longmoe.integrations.transformers.families import Family
from hf_longmoe.integrations.transformers.own_blocks import ReplacedForward, own_block
from hf_longmoe.integrations.transformers.refusals import check_expert_dtype, why_left_alone
from hf_longmoe.integrations.transformers.router_loss import RouterLoss, router_loss_of
from hf_longmoe.schedules.dispatch import LocalDispatch, ModelKernel, TokenTiles

if TYPE_CHECKING:
    from hf_longmoe.integrations.transformers.patch import Patch

__all__ = ["plan_dispatch"]

_SEPARATE = (
    "its experts are modules of their own, not stacked weights behind Transformers' experts interface; load the model"
    " as a class of Transformers (trust_remote_code=False), if there is one"
)


def plan_dispatch(patch: Patch, family: Family) -> Iterator[Action]:
    """What to do to the experts, shared experts and dense MLPs; everything is checked, nothing done yet."""
    config, model = patch.config.dispatch, patch.model
    experts = {name: module for name, module in model.named_modules() if runs_in_waves(module)}
    if config is None:
        patch.entries.extend(Entry(name, "dispatch", None, "dispatch=None in the config") for name in experts)
        return
    patch.entries.extend(_not_known(model, family))
    sharding = getattr(model.config, "distributed_config", None)
    if (
        experts
        and sharding is not None
        and sharding.ep_size > 1
        and not any(map(is_expert_parallel, experts.values()))
    ):
        raise ValueError(
            f'patch_model: ep_size={sharding.ep_size}, but no rule of the ep_plan is "ep_dispatch_experts", so that'
            " Transformers has not divided the experts: every rank computes all of them. Leave ep_plan out to get the"
            " model's own, or add that rule for the experts modules."
        )
    dense: dict[str, tuple[nn.Module, bool]] = {}
    for name, module in experts.items():
        parent = model.get_submodule(block_name(name))
        adapters = adapters_of(model, name)
        if is_expert_parallel(module):
            settings = ExpertSettings(config, family.output_saved_after)
            ranks = model._mesh_manager.get_mesh("ep").size()
            check_expert_dtype(name, module, sharding)
            if reason := adapters if isinstance(adapters, str) else why_not(module, ranks):
                patch.entries.append(Entry(name, "dispatch", None, reason))
            else:
                note = ep_note(module, ranks, config, adapters)
                patch.entries.append(Entry(name, "dispatch", "PipelinedLLEP", note))
                yield partial(install, model, module, settings)
                if adapters is not None:
                    yield partial(adapters.install, module)
        elif isinstance(adapters, str):
            patch.entries.append(Entry(name, "dispatch", None, adapters))
        elif reason := (
            why_left_alone(name, module, adapters_known=adapters is not None) or _why_parent_is_left(module, parent)
        ):
            patch.entries.append(Entry(name, "dispatch", None, reason))
        else:
            schedule = LocalDispatch(config.budget, family.output_saved_after)
            note = _experts_note(schedule, module, config.kernel, adapters)
            patch.entries.append(Entry(name, "dispatch", "expert-major waves", note))
            yield partial(patch_experts, module, schedule, config.kernel)
            if (own := own_block(module)) is not None and own.parent is not None:
                yield partial(_replace_forward, patch, parent, own.parent)
            if adapters is not None:
                yield partial(adapters.install, module)
        for child in family.shared:
            if (shared := getattr(parent, child, None)) is not None:
                dense[f"{block_name(name)}.{child}"] = (shared, family.shared_saved_after)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}
    sparse = {n for n, layer in layers.items() if any(map(runs_in_waves, layer.modules()))}
    for name in sparse:
        for child in family.beside:
            if (shared := getattr(layers[name], child, None)) is not None:
                dense[f"{name}.{child}"] = (shared, family.shared_saved_after)
    if experts and family.dense:
        kinds = {type(layers[n]) for n in sparse}  # a vision tower's layers are none of them
        for name, layer in layers.items():
            if name not in sparse and type(layer) in kinds:
                dense[f"{name}.{family.dense}"] = (getattr(layer, family.dense), family.output_saved_after)
    for name, (module, saved_after) in dense.items():
        if reason := why_left_alone(name, module):
            patch.entries.append(Entry(name, "dispatch", None, reason))
            continue
        tiles = TokenTiles(config.budget, saved_after)
        tokens = tiles.tokens(
            module, _like_input(next(module.parameters()), model.config.get_text_config().hidden_size)
        )
        patch.entries.append(Entry(name, "dispatch", "token tiles", f"{tokens} tokens at a time"))
        yield partial(patch_mlp, module, tiles)
    if experts and (found := router_loss_of(model)):
        patch.entries.append(Entry("router logits", "aux", "sums by layer", f"of {len(found[1])} routers"))
        yield partial(_stream_router_loss, patch, *found)


def _experts_note(schedule: LocalDispatch, experts: nn.Module, kernel: str, adapters: Any) -> str:
    block, params = block_of(experts, kernel, {} if adapters is None else adapters.active())
    hidden = hidden_of(experts)
    kernel = f"the model's {experts.config._experts_implementation if is_experts(experts) else 'own forward'}"
    how = kernel if isinstance(block, ModelKernel) else "written-out backward"
    how = how if adapters is None else f"{how}, {adapters}"
    return f"{schedule.rows(_like_input(params[0], hidden), block, params)} rows at a time, {how}"


def _like_input(param: torch.Tensor, hidden: int) -> torch.Tensor:
    return torch.empty(0, hidden, dtype=param.dtype, device="meta")


def _stream_router_loss(patch: Patch, router_loss: RouterLoss, routers: list[nn.Module]) -> None:
    patch.router_loss = router_loss
    patch.handles += [router.register_forward_hook(router_loss.hook) for router in routers]


def _not_known(model: nn.Module, family: Family) -> Iterator[Entry]:
    """Experts that no schedule knows how to run."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in family.left_alone:
            yield Entry(name, "dispatch", None, family.left_alone[kind])
        elif name.rpartition(".")[2] == "experts" and isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            yield Entry(name, "dispatch", None, _SEPARATE)


def _why_parent_is_left(experts: nn.Module, parent: nn.Module) -> str | None:
    """Of experts that are dispatched by what they stand in."""
    own = own_block(experts)
    if own is not None and own.parent is not None and "forward" in vars(parent):
        return f"something else replaced the forward of the {type(parent).__name__} that it stands in"
    return None


def _replace_forward(patch: Patch, module: nn.Module, forward: Any) -> None:
    patch.handles.append(ReplacedForward(module, forward))
