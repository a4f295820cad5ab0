"""Which models can share their sequences exactly; the others are refused by name, before anything is changed."""

from __future__ import annotations

import inspect

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_longmoe.integrations.transformers.head import TiledLoss

__all__ = ["check_shareable"]

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_BY_LENGTH = {"dynamic", "longrope"}  # rotary frequencies that depend on the length that a rank sees


def check_shareable(model: PreTrainedModel, size: int) -> None:
    """
    Arguments:
        size: ranks that share a sequence.

    Raises:
        `ValueError`: the model cannot share its sequences over so many ranks, and why.
    """
    reason = _why_not(model, size)
    if reason is not None:
        raise ValueError(f"ParallelismConfig.cp_size={size}: {type(model).__name__} {reason}.")


def _why_not(model: PreTrainedModel, size: int) -> str | None:
    config = model.config.get_text_config()
    if config is not model.config or config.is_encoder_decoder:
        return "is not a decoder of text alone; set cp_size to 1"
    kernel = config._attn_implementation
    if not model._can_set_attn_implementation():
        return "does not use Transformers' attention interface; set cp_size to 1"
    if kernel not in ALL_ATTENTION_FUNCTIONS.valid_keys() or kernel.startswith("paged|"):
        return f'has attn_implementation="{kernel}", which Ulysses cannot wrap; load it with "sdpa", or a flash kernel'
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or config.num_attention_heads
        if heads % size:
            fits = [n for n in range(2, size) if not heads % n and not size % n]
            return f"has {name}={heads}, which {size} ranks cannot divide; set cp_size to one of {[1, *fits]}"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS)
    if others or model._is_stateful:
        return f"has layers that mix tokens in another way ({', '.join(others) or 'a state'}); set cp_size to 1"
    for name, module in model.named_modules():
        if reason := _layer_reason(name, module):
            return f"{reason}; set cp_size to 1"
    loss = model.loss_function
    loss = loss.stock if isinstance(loss, TiledLoss) else loss
    parameters = inspect.signature(type(model).forward).parameters.values()
    if loss is not ForCausalLMLoss or all(p.kind is not p.VAR_KEYWORD for p in parameters):
        return "does not compute its loss with ForCausalLMLoss from labels that are shifted before; set cp_size to 1"
    return None


def _layer_reason(name: str, module: nn.Module) -> str | None:
    kinds = getattr(module, "rope_type", ())
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds} if isinstance(kinds, str) else set()
    if kinds & _BY_LENGTH:
        return (
            f'has rotary embeddings of type "{min(kinds & _BY_LENGTH)}", which depend on the length that a rank sees'
        )
    if name.rpartition(".")[2] == "indexer":
        return f"chooses keys by an indexer ({name}), which would see a part of them"
    if any(child.endswith("sinks") for child, _ in module.named_parameters(recurse=False)):
        return f"has attention sinks ({name}), which Ulysses does not divide by heads"
    return None
