"""`patch_model`: swaps MoE blocks and the LM head of a causal LM for schedule-aware ones, undoably."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from hf_longmoe.config import LongMoEConfig
from hf_longmoe.integrations.transformers.adapters import adapters_of, adopt_adapters, head_adapters_of
from hf_longmoe.integrations.transformers.causal_lm import causal_lm
from hf_longmoe.integrations.transformers.checkpoint_function import checkpointing_of, wrap_checkpointing
from hf_longmoe.integrations.transformers.expert_parallel import (
    ExpertSettings,
    ep_note,
    install,
    is_expert_parallel,
    uninstall,
    why_not,
)
from hf_longmoe.integrations.transformers.experts import (
    block_name,
    block_of,
    hidden_of,
    is_experts,
    patch_experts,
    patch_mlp,
    restore_forward,
)
from hf_longmoe.integrations.transformers.families import Family, family_of
from hf_longmoe.integrations.transformers.forward import patch_forward, restore_model_forward
from hf_longmoe.integrations.transformers.head import (
    head_report,
    head_rows,
    patch_head,
    restore_head,
    ring_rows,
)
from hf_longmoe.integrations.transformers.refusals import check_expert_dtype, check_model, why_left_alone
from hf_longmoe.integrations.transformers.ring_head import Ring, ring_of, why_no_ring
from hf_longmoe.integrations.transformers.router_loss import RouterLoss, router_loss_of
from hf_longmoe.integrations.transformers.routing_pins import pin_routing
from hf_longmoe.integrations.transformers.tp_head import divided_of, is_divided, stock_forward
from hf_longmoe.schedules.dispatch import LocalDispatch, ModelKernel, TokenTiles

__all__ = ["Entry", "Patch", "patch_model", "unpatch_model"]

logger = logging.get_logger(__name__)
Action = Callable[[], None]


@dataclass(frozen=True)
class Entry:
    """One line of the report: what happened to one module."""

    module: str
    component: str
    schedule: str | None  # None: left alone
    note: str

    def __str__(self) -> str:
        return f"{self.module}: {self.component}, {self.schedule or 'left alone'} ({self.note})"


@dataclass
class Patch:
    """`model.longmoe`: what was patched, what was left alone and why. As a context manager it unpatches on exit."""

    model: PreTrainedModel
    config: LongMoEConfig
    entries: list[Entry] = field(default_factory=list)
    head: str | None = None  # the name of the patched LM head
    ring: Ring | None = None  # of a head whose weight stays divided
    router_loss: RouterLoss | None = None
    launch_checked: bool = False
    inside: bool = False  # whether the patched forward is running
    handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> PreTrainedModel:
        return self.model

    def __exit__(self, *exception: Any) -> None:
        unpatch_model(self.model)

    def __str__(self) -> str:
        return "\n".join(map(str, self.entries))

    def adapted(self, before: str, name: str, adapters: Any) -> None:
        """A module of the report has another name since adapters wrap it; a string says why it is left alone."""
        for i, entry in enumerate(self.entries):
            if entry.module == before and isinstance(adapters, str):
                self.entries[i] = replace(entry, module=name, schedule=None, note=adapters)
            elif entry.module == before:
                self.entries[i] = replace(entry, module=name, note=f"{entry.note}, {adapters}")

    def leave_head_alone(self, reason: str) -> None:
        """Corrects the report once a call has shown that the head's schedule cannot be used."""
        entry = Entry(self.head, "vocab", None, reason)
        if entry not in self.entries:
            logger.warning(f"{entry}: the stock loss is used, and its memory is not bounded.")
            self.entries = [entry if e.component == "vocab" else e for e in self.entries]


def patch_model(model: nn.Module, config: LongMoEConfig | None = None) -> nn.Module:
    """
    Bounds the expert dispatch and the vocabulary projection of a causal LM; loss and gradients stay exact.

    Arguments:
        model: a `PreTrainedModel` causal LM, or a DDP, PEFT or compiled wrapper of one.
        config: the caps; the defaults if not given. A part that is `None` is left as it is.

    Returns:
        The same object, patched in place: `state_dict`, `save_pretrained` and `generate` work as before, and
        `model.longmoe` (of the `PreTrainedModel`) reports what was done. Patching again with the same config changes
        nothing; with another it patches anew.

    Raises:
        `ValueError`: nothing in the model can be patched, it is held in an unsupported way, or a budget is too small
            for it; before anything was changed.
    """
    config = LongMoEConfig() if config is None else config
    target = causal_lm(model)
    before: Patch | None = vars(target).get("longmoe")
    if before is not None and before.config == config:
        adopt_adapters(before)
        return model
    check_model(model, target, config)
    unpatch_model(model)
    try:
        _patch(target, config)
    except ValueError:
        if before is not None:
            _patch(target, before.config)
        raise
    return model


def _patch(target: PreTrainedModel, config: LongMoEConfig) -> None:
    patch = Patch(target, config)
    family = family_of(target.config.get_text_config().model_type)
    actions = [*_plan_dispatch(patch, family), *_plan_head(patch)]
    if not actions:
        left = "; ".join(map(str, patch.entries)) or f"{type(target).__name__} has no experts and no LM head"
        raise ValueError(
            "patch_model: nothing to patch. Supported: experts that go through Transformers' experts interface, and an"
            f" nn.Linear LM head under ForCausalLMLoss. Here: {left}."
        )
    for action in actions:
        action()
    target.longmoe = patch
    patch_forward(target)
    know_replay(target, True)
    patch.handles += pin_routing(target)


def unpatch_model(model: nn.Module) -> nn.Module:
    """Puts back exactly what `patch_model` found. A model that is not patched is left as it is."""
    target = causal_lm(model)
    patch: Patch | None = vars(target).pop("longmoe", None)
    if patch is not None:
        for handle in patch.handles:
            handle.remove()
        for module in target.modules():
            if "longmoe_ep_forward" in vars(module):
                uninstall(module)
            elif "longmoe_schedule" in vars(module):
                restore_forward(module)
        if patch.head is not None:
            restore_head(target)
        know_replay(target, False)
        restore_model_forward(target)
    return model


def know_replay(model: PreTrainedModel, on: bool) -> None:
    """Whether checkpointed layers know which pass they are in; again after layers were wrapped for checkpointing."""
    settings = checkpointing_of(model)
    settings.replay = on
    wrap_checkpointing(model, settings)


def _plan_dispatch(patch: Patch, family: Family) -> Iterator[Action]:
    """What to do to the experts, shared experts and dense MLPs; everything is checked, nothing done yet."""
    config, model = patch.config.dispatch, patch.model
    experts = {name: module for name, module in model.named_modules() if is_experts(module)}
    if config is None:
        patch.entries.extend(Entry(name, "dispatch", None, "dispatch=None in the config") for name in experts)
        return
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
        elif reason := why_left_alone(name, module, adapters_known=adapters is not None):
            patch.entries.append(Entry(name, "dispatch", None, reason))
        else:
            schedule = LocalDispatch(config.budget, family.output_saved_after)
            note = _experts_note(schedule, module, config.kernel, adapters)
            patch.entries.append(Entry(name, "dispatch", "expert-major waves", note))
            yield partial(patch_experts, module, schedule, config.kernel)
            if adapters is not None:
                yield partial(adapters.install, module)
        for child in family.shared:
            if (shared := getattr(parent, child, None)) is not None:
                dense[f"{block_name(name)}.{child}"] = (shared, family.shared_saved_after)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}
    sparse = {n for n, layer in layers.items() if any(map(is_experts, layer.modules()))}
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
    kernel = f"the model's {experts.config._experts_implementation}"
    how = kernel if isinstance(block, ModelKernel) else "written-out backward"
    how = how if adapters is None else f"{how}, {adapters}"
    return f"{schedule.rows(_like_input(params[0], hidden), block, params)} rows at a time, {how}"


def _like_input(param: torch.Tensor, hidden: int) -> torch.Tensor:
    return torch.empty(0, hidden, dtype=param.dtype, device="meta")


def _stream_router_loss(patch: Patch, router_loss: RouterLoss, routers: list[nn.Module]) -> None:
    patch.router_loss = router_loss
    patch.handles += [router.register_forward_hook(router_loss.hook) for router in routers]


def _plan_head(patch: Patch) -> Iterator[Action]:
    model, config = patch.model, patch.config.vocab
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        return
    adapters = head_adapters_of(lm_head)
    known = adapters is not None and not isinstance(adapters, str)
    heads = adapters.heads if known else [lm_head]
    lm_head = heads[0]
    name = next(name for name, module in model.named_modules() if module is lm_head)
    divided = divided_of(model) if is_divided(model, lm_head) and stock_forward(lm_head) else None
    reason = "vocab=None in the config" if config is None else adapters if isinstance(adapters, str) else None
    reason = reason or why_left_alone(name, lm_head, divided is not None, known) or head_report(model, lm_head)
    no_ring = reason or ("an adapter wraps it" if known else why_no_ring(model, lm_head))
    if config is not None and config.schedule == "ring" and no_ring:
        raise ValueError(
            f'vocab.schedule="ring": {name} cannot use it: {no_ring}. "auto" takes tiles where it cannot be used.'
        )
    if reason:
        patch.entries.append(Entry(name, "vocab", None, reason))
        return
    if config.schedule != "tiles" and not no_ring:
        patch.ring = ring_of(lm_head)
        size = ring_rows(model, lm_head, config)
        note = (
            f"blocks of {size} tokens by {size} entries, over {patch.ring.wire.size} ranks; no rank gathers the weight"
        )
        patch.entries.append(Entry(name, "vocab", "ring", note))
    elif divided is not None:
        size = ring_rows(model, lm_head, config)
        note = f"blocks of {size} tokens by {size} entries, sums over {divided.wire.size} tensor-parallel ranks"
        patch.entries.append(Entry(name, "vocab", "divided tiles", note))
    else:
        rows = head_rows(model, lm_head, config, adapters.rank if known else 0)
        tied = ", tied to the input embeddings" if model.get_input_embeddings().weight is lm_head.weight else ""
        gathers = f"; {no_ring}" if isinstance(lm_head.weight, DTensor) and no_ring and not known else ""
        adapted = f", {adapters}" if known else ""
        patch.entries.append(Entry(name, "vocab", "tiles", f"{rows} tokens at a time{tied}{gathers}{adapted}"))
    patch.head = name
    yield partial(patch_head, model, heads, config, divided)
    if known:
        yield adapters.install
