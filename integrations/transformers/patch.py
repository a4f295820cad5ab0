"""`patch_model`: swaps MoE blocks and the LM head of a causal LM for schedule-aware ones, undoably."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_longmoe.config import LongMoEConfig
from hf_longmoe.integrations.transformers.adapters import adopt_adapters, head_adapters_of
from hf_longmoe.integrations.transformers.causal_lm import causal_lm
from hf_longmoe.integrations.transformers.checkpoint_function import checkpointing_of, wrap_checkpointing
from hf_longmoe.integrations.transformers.entry import Action, Entry
from hf_longmoe.integrations.transformers.expert_parallel import (
    uninstall,
)
from hf_longmoe.integrations.transformers.experts import (
    restore_forward,
)
from hf_longmoe.integrations.transformers.families import Family, family_of
from hf_longmoe.integrations.transformers.forward import patch_forward, restore_model_forward
from hf_longmoe.integrations.transformers.head import (
    head_report,
    head_rows,
    is_patched,
    patch_head,
    restore_head,
    ring_rows,
)
from hf_longmoe.integrations.transformers.patch_dispatch import plan_dispatch
from hf_longmoe.integrations.transformers.refusals import check_model, why_left_alone
from hf_longmoe.integrations.transformers.ring_head import Ring, ring_of, why_no_ring
from hf_longmoe.integrations.transformers.router_loss import RouterLoss
from hf_longmoe.integrations.transformers.routing_pins import pin_routing
from hf_longmoe.integrations.transformers.tp_head import divided_of, is_divided, stock_forward

__all__ = ["Entry", "Patch", "patch_model", "unpatch_model"]

logger = logging.get_logger(__name__)


@dataclass
class Patch:
    """`model.longmoe`: what was patched, what was left alone and why. As a context manager it unpatches on exit."""

    model: PreTrainedModel
    config: LongMoEConfig
    entries: list[Entry] = field(default_factory=list)
    head: str | None = None  # the name of the patched LM head
    head_left: bool = False  # since a call has shown that its schedule cannot be used
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
        return "\n".join(map(str, self.entries)) or "no caps for dispatch and vocab: nothing is patched"

    def adapted(self, before: str, name: str, adapters: Any) -> None:
        """A module of the report has another name since adapters wrap it; a string says why it is left alone."""
        for i, entry in enumerate(self.entries):
            if entry.module == before and isinstance(adapters, str):
                self.entries[i] = replace(entry, module=name, schedule=None, note=adapters)
            elif entry.module == before:
                self.entries[i] = replace(entry, module=name, note=f"{entry.note}, {adapters}")

    def leave_head_alone(self, reason: str) -> None:
        """Corrects the report once a call has shown that the head's schedule cannot be used."""
        self.head_left = True
        entry = Entry(self.head, "vocab", None, reason)
        if entry not in self.entries:
            logger.warning(f"{entry}: the stock loss is used, and its memory is not bounded.")
            self.entries = [entry if e.component == "vocab" else e for e in self.entries]


def patch_model(model: nn.Module, config: LongMoEConfig | None = None) -> nn.Module:
    """
    Bounds the expert dispatch and the vocabulary projection of a causal LM; loss and gradients stay exact.

    Arguments:
        model: a `PreTrainedModel` causal LM, or a DDP, PEFT or compiled wrapper of one.
        config: the caps; the defaults if not given. A part that is `None` is left as it is, and all of the model if
            both `dispatch` and `vocab` are.

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
    # Of a head that is another now, or that another adapter wraps.
    anew = before is not None and before.head is not None and (before.head_left or not is_patched(target))
    if before is not None and before.config == config and not anew:
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
    if config.dispatch is None and config.vocab is None:  # a plan's, say, of a model that fits as it is
        target.longmoe = patch
        return
    family = family_of(target.config.get_text_config().model_type)
    actions = [*plan_dispatch(patch, family), *_plan_head(patch, family)]
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
        hooks = {handle.id for handle in patch.handles if isinstance(handle, RemovableHandle)}
        for module in target.modules():
            for known in (module._forward_pre_hooks, module._forward_hooks):  # of copies: PEFT's `modules_to_save`
                for hook in hooks & known.keys():
                    del known[hook]
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


def _plan_head(patch: Patch, family: Family) -> Iterator[Action]:
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
    reason = reason or family.head_left_alone or why_left_alone(name, lm_head, divided is not None, known)
    reason = reason or head_report(model, lm_head)
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
