"""Adapters around what is patched: found in a model without importing PEFT where nobody else has."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from accelerate.utils import is_peft_model
from torch import nn

from hf_longmoe.integrations.transformers.by_token import why_not_by_token
from hf_longmoe.integrations.transformers.experts import runs_in_waves, standing_in
from hf_longmoe.schedules.dispatch import TokenTiles

if TYPE_CHECKING:
    from hf_longmoe.integrations.peft import ExpertAdapters, HeadAdapters
    from hf_longmoe.integrations.transformers.patch import Patch

__all__ = ["adapter_state_dict_of", "adapters_of", "adopt_adapters", "head_adapters_of"]


def adapters_of(model: nn.Module, name: str) -> ExpertAdapters | str | None:
    """What wraps the experts module of this name, or why it has to be left alone; `None` if nothing does."""
    if "peft" not in sys.modules:
        return None
    from hf_longmoe.integrations.peft import expert_adapters

    return expert_adapters(model, name)


def head_adapters_of(lm_head: nn.Module) -> HeadAdapters | str | None:
    """The same of what a model calls as its LM head."""
    if "peft" not in sys.modules:
        return None
    from hf_longmoe.integrations.peft import head_adapters

    return head_adapters(lm_head)


def adapter_state_dict_of(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """What `save_pretrained` of a `PeftModel` is to be given where the model was sharded at load; `None` of others."""
    if not is_peft_model(model):
        return None
    from hf_longmoe.integrations.peft import adapter_state_dict

    return adapter_state_dict(model)


def adopt_adapters(patch: Patch) -> None:
    """Has adapters that were put on since `patch_model` run by the schedules too."""
    for name, module in patch.model.named_modules():
        if isinstance(vars(module).get("longmoe_schedule"), TokenTiles) and (reason := why_not_by_token(module)):
            patch.adapted(name, name, reason)
        if not runs_in_waves(module) or "longmoe_schedule" not in vars(module):
            continue
        adapters, known = adapters_of(patch.model, name), vars(module).get("longmoe_adapters")
        if adapters is None or known is not None and known.wrappers == getattr(adapters, "wrappers", None):
            continue
        if known is not None:
            known.remove()
        patch.adapted(standing_in(name), name, adapters)
        if not isinstance(adapters, str):
            adapters.install(module)
    head = patch.model.get_output_embeddings()
    if patch.head is not None and (adapters := head_adapters_of(head)) is not None:
        if not isinstance(adapters, str) and "longmoe_head_adapters" not in vars(head):
            adapters.install()
