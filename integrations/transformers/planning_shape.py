"""A config alone -> `ModelShape`. The model is built on `meta`: every count is exact; no weights, no network."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from hf_longmoe.integrations.transformers.experts import block_of, hidden_of, is_experts
from hf_longmoe.planner.depth import depths, periods
from hf_longmoe.planner.shape import LayerParameters, ModelShape
from hf_longmoe.schedules.dispatch import GatedMLP

__all__ = ["at_depth", "build", "decoder_layers", "depths_of", "on_meta", "shape_of"]

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts", "top_k", "moe_top_k")
_PARTS = {
    "attention": ("attn", "attention", "mamba", "mixer", "conv", "temporal", "linear_attn"),
    "dense": ("mlp", "feed_forward", "ffn", "moe", "block"),
}


def build(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16, **options) -> PreTrainedModel:
    """
    The causal LM of a config, in training mode; of a multimodal one its text part, where that is a model of its own.

    Arguments:
        config: is copied; how a model that was sharded at load is divided is left out.
        dtype: of the parameters.
        options: of `_from_config`, e.g. `attn_implementation`.

    Raises:
        `ValueError`: there is no causal LM for it, or it does not build; the message names what is missing.
    """
    whole = copy.deepcopy(config)
    text = whole.get_text_config()
    for part in (whole, text):
        vars(part).pop("distributed_config", None)
    for found, known in (
        (text, MODEL_FOR_CAUSAL_LM_MAPPING),
        (whole, MODEL_FOR_CAUSAL_LM_MAPPING),
        (whole, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    ):
        if type(found) in known:
            kind = known[type(found)]
            break
    else:
        raise ValueError(
            f"config of model type {config.model_type!r}: there is no causal LM for it; give the config of one."
        )
    kind = kind[0] if isinstance(kind, (list, tuple)) else kind
    try:
        return kind._from_config(found, dtype=dtype, **options).train()
    except (AttributeError, KeyError, TypeError, AssertionError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"config of model type {config.model_type!r} builds no model ({problem}).") from error


def on_meta(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16, **options) -> PreTrainedModel:
    """
    `build` without data. Outside of any fake mode: under one, no module's dtype can be changed, as some families do in
    their `__init__`.
    """
    with unset_fake_temporarily(), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # initialising meta tensors does nothing
        return build(config, dtype, **options)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """
    Raises:
        `ValueError`: no list of as many modules as the config has layers.
    """
    text = model.config.get_text_config()
    for module in model.modules():
        for _, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == text.num_hidden_layers:
                return child
    raise ValueError(
        f"config of model type {text.model_type!r}: num_hidden_layers={text.num_hidden_layers}, but"
        f" {type(model).__name__} has no list of so many layers."
    )


def at_depth(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    """A copy with the first `depth` layers; whatever lists one entry a layer is cut with it."""
    cut = copy.deepcopy(config)
    text = cut.get_text_config()
    count = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, (list, tuple)) and len(value) == count and name not in ("id2label", "architectures"):
            setattr(text, name, value[:depth])
    if getattr(text, "mlp_only_layers", None):
        text.mlp_only_layers = [layer for layer in text.mlp_only_layers if layer < depth]
    text.num_hidden_layers = depth
    return cut


def _kinds(model: PreTrainedModel) -> list[Hashable]:
    """What tells layers apart: class, parameters, kind of attention."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or []
    layers = decoder_layers(model)
    types = types if len(types) == len(layers) else [None] * len(layers)
    sizes = [tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()) for layer in layers]
    return [(type(layer), size, kind) for layer, size, kind in zip(layers, sizes, types, strict=True)]


def depths_of(config: PreTrainedConfig) -> tuple[int, ...]:
    """
    See `planner.depth.depths`: two depths to run, or the real one alone where the model is as shallow as that, or
    where a layer reads what all blocks of layers before it left: bytes then grow with the square of the depth.
    """
    text = _require(config)
    if hasattr(text, "n_layers_per_attn_res_block"):
        return (text.num_hidden_layers,)
    return depths(_kinds(on_meta(config)))


def _field(text: PreTrainedConfig, name: str) -> Any:
    """Of a field that differs from layer to layer, its largest value; `None` where there is none."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # which is how such a field says so
        values = [getattr(layer, name, None) for layer in text.per_layer_config]
        return max((value for value in values if value is not None), default=None)


def _require(config: PreTrainedConfig) -> PreTrainedConfig:
    text = config.get_text_config()
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"):
        value = _field(text, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"config of model type {text.model_type!r}: {name}={value!r} must be a positive number.")
    return text


def shape_of(config: PreTrainedConfig) -> ModelShape:
    """
    Arguments:
        config: of a causal LM; of a multimodal model its text part counts.

    Raises:
        `ValueError`: something is missing, which the message names, or there is no causal LM for it.
    """
    text = _require(config)
    model = on_meta(config)
    layers, owners = decoder_layers(model), set()
    parts = []
    for layer in layers:
        parts.append(_layer_parameters(layer))
        owners.update(layer.parameters())
    experts = next((m for m in layers.modules() if is_experts(m)), None)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and getattr(head, "weight", None) is embedding.weight
    alone = [] if head is None else [p for p in head.parameters() if p is not embedding.weight]
    rest = [(name, p) for name, p in model.named_parameters() if p not in owners and not any(p is q for q in alone)]
    rest = [(name, p) for name, p in rest if p is not embedding.weight]
    norm = sum(p.numel() for name, p in rest if "norm" in name)
    prefix, period = periods(_kinds(model))
    heads = _field(text, "num_attention_heads")
    plain = _field(text, "head_dim") or text.hidden_size // heads
    rope, ranked = _field(text, "qk_rope_head_dim") or 0, bool(_field(text, "kv_lora_rank"))
    return ModelShape(
        model_type=text.model_type,
        hidden=text.hidden_size,
        vocab=text.vocab_size if head is None or not hasattr(head, "weight") else head.weight.shape[0],
        layers=tuple(parts),
        embedding=embedding.weight.numel(),
        head=sum(p.numel() for p in alone),
        final_norm=norm,
        other=sum(p.numel() for _, p in rest) - norm,
        wide=tuple(sum(p.numel() for p in layer.parameters() if p.dtype == torch.float32) for layer in layers),
        largest_parameter=max(p.numel() for p in model.parameters()),
        heads=heads,
        kv_heads=_field(text, "num_key_value_heads") or heads,
        head_dim=_field(text, "qk_nope_head_dim") + rope if ranked else plain,
        value_dim=_field(text, "v_head_dim") if ranked else plain,
        q_rank=(_field(text, "q_lora_rank") or 0) if ranked else 0,
        kv_rank=_field(text, "kv_lora_rank") if ranked else 0,
        rope_dim=rope if ranked else 0,
        tied=tied,
        softcap=_field(text, "final_logit_softcapping") is not None,
        head_bias=getattr(head, "bias", None) is not None,
        shared_width=_width(layers, "shared", text.hidden_size),
        dense_width=_dense_width(layers, text.hidden_size),
        router_loss=bool(getattr(text, "output_router_logits", False)),
        prefix=prefix,
        period=period,
        **_experts(text, layers, experts, any(part.experts for part in parts)),
    )


def _experts(text: PreTrainedConfig, layers: nn.ModuleList, experts: nn.Module | None, any_experts: bool) -> dict:
    if not any_experts:
        return {}
    top_k = next((value for name in _TOP_K if isinstance(value := _field(text, name), int)), None)
    if top_k is None:
        raise ValueError(f"config of model type {text.model_type!r} has none of {', '.join(_TOP_K)}.")
    if experts is None:  # not by the experts interface: what the config says
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        count = next((value for name in names if isinstance(value := _field(text, name), int)), None)
        if count is None:
            raise ValueError(f"config of model type {text.model_type!r} has none of {', '.join(names)}.")
        width = _field(text, "moe_intermediate_size") or getattr(text, "intermediate_size", 0)
        return dict(experts=count, top_k=top_k, expert_width=width, standard=False)
    down = experts.down_proj
    block, _ = block_of(experts, "auto")
    return dict(
        experts=down.shape[0],
        top_k=top_k,
        expert_width=down.shape[1 if experts.is_transposed else 2],
        expert_bias=experts.has_bias,
        gated=experts.has_gate,
        standard=isinstance(block, GatedMLP),
        router_dtype=_router_dtype(layers, experts),
    )


def _layer_parameters(layer: nn.Module) -> LayerParameters:
    inside = {name for name, module in layer.named_modules() if is_experts(module)}
    blocks = {name.rpartition(".")[0] for name in inside}
    counts: dict[str, int] = {}
    for name, p in layer.named_parameters():
        part = _part(name, inside, blocks)
        counts[part] = counts.get(part, 0) + p.numel()
    return LayerParameters(**counts)


def _part(name: str, experts: set[str], blocks: set[str]) -> str:
    names = name.split(".")
    if any(name.startswith(f"{place}.") for place in experts) or "experts" in names:
        return "experts"
    if any("shared" in part for part in names):
        return "shared"
    in_block = any(name.startswith(f"{block}." if block else "") for block in blocks)
    if in_block and any("router" in part or part in ("gate", "wg") for part in names):
        return "router"
    if "norm" in names[0]:
        return "norms"
    for part, known in _PARTS.items():
        if any(word in names[0] for word in known):
            return part
    return "other"


def _linears(layers: nn.ModuleList) -> Iterator[tuple[list[str], nn.Linear]]:
    for layer in layers:
        experts = [name for name, module in layer.named_modules() if is_experts(module)]
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and not any(name.startswith(f"{place}.") for place in experts):
                yield [*name.split("."), "sparse" if experts else ""], module


def _width(layers: nn.ModuleList, word: str, hidden: int) -> int:
    """The inner width of the MLPs whose name has `word` in it: what their last product contracts."""
    found = (m.in_features for names, m in _linears(layers) if any(word in n for n in names[:-2] or names[:1]))
    return max((width for width in found if width != hidden), default=0)


def _dense_width(layers: nn.ModuleList, hidden: int) -> int:
    found = [
        m
        for names, m in _linears(layers)
        if not names[-1] and any(word in names[0] for word in _PARTS["dense"]) and m.out_features == hidden
    ]
    return max((m.in_features for m in found), default=0)


class _Seen(Exception):
    pass


def _router_dtype(layers: nn.ModuleList, experts: nn.Module) -> str:
    """What reaches the experts, from a call of their block on `meta`; float32, the larger, if that is not callable."""
    block = next((m for m in layers.modules() if any(child is experts for child in m.children())), None)
    seen = []

    def stop(_: nn.Module, args: tuple) -> None:
        seen.extend(t.dtype for t in args[1:] if isinstance(t, torch.Tensor) and t.is_floating_point())
        raise _Seen

    handle = experts.register_forward_pre_hook(stop)
    try:
        block(torch.empty(1, 8, hidden_of(experts), dtype=experts.down_proj.dtype, device="meta"))
    except Exception:  # noqa: BLE001, S110 (a block with a call of its own)
        pass
    finally:
        handle.remove()
    return str(seen[0]).removeprefix("torch.") if seen else "float32"
