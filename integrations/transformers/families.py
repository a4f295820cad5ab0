"""What a model family does around its experts, as data. Everything else is found by interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["FAMILIES", "Family", "family_of"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """
    One row; the defaults are right for every family, and cost a family that could do better only time.

    Arguments:
        output_saved_after: whether something after the experts (or a dense MLP in their place), in the same decoder
            layer, saves a tensor that depends on their output (a norm after the block does; an addition, or a product
            with a constant, does not). `False` lets a replay under checkpointing skip them.
        shared: names, within the MoE block, of shared experts that take each token by itself; of those that a model
            has.
        beside: the same, within the decoder layer.
        shared_saved_after: as `output_saved_after`, of the shared experts (a gate that multiplies them saves them).
        dense: the name, within a decoder layer, of the MLP that the layers without experts have.
        left_alone: classes of experts that no schedule runs, each with the reason.
        head_left_alone: why the LM head has no schedule.
    """

    output_saved_after: bool = True
    shared: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    shared_saved_after: bool = True
    dense: str | None = None
    left_alone: Mapping[str, str] = field(default_factory=dict)
    head_left_alone: str | None = None


_SHARED = ("shared_experts", "shared_expert", "shared_mlp")
_ADDED = Family(output_saved_after=False, shared_saved_after=False, shared=_SHARED, dense="mlp")
_ALONE = Family(output_saved_after=False, dense="mlp")
# A norm, a convolution or a mix of streams comes after the block.
_USED = Family(shared=_SHARED, dense="mlp")
_GATED = Family(output_saved_after=False, shared=("shared_expert",), dense="mlp")
_BESIDE = Family(output_saved_after=False, shared_saved_after=False, beside=("shared_mlp",))
_ENCODER_DECODER = "it is an encoder-decoder, whose loss is a cross-entropy of its own"
_CAPACITY = "its experts are modules of their own, which drop tokens beyond a capacity"
_FEED_FORWARD = Family(output_saved_after=False, dense="feed_forward")

# By the model type of the text; `_text` at its end left out.
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("afmoe", "axk1", "beam", "deepseek_v4", "glm5_next", "hy_v4", "hy_v4_vl", "kolibri1"), _USED),
    **dict.fromkeys(("aria", "axk2", "bailing_hybrid", "cohere2_moe", "deepseek_ocr2", "deepseek_v2"), _ADDED),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "dots1", "dots3_note", "ernie4_5_moe", "exaone_moe"), _ADDED),
    **dict.fromkeys(("flint", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe"), _ADDED),
    **dict.fromkeys(("hy_v3", "kimi_linear", "laguna", "lara_mini", "minimax_m3_vl", "mistral4"), _ADDED),
    **dict.fromkeys(("mistral_large4", "solar_open", "unlimited_ocr"), _ADDED),
    **dict.fromkeys(("gpt_oss", "granitemoe", "mellum", "mimo_v2_flash", "minimax_m2", "mixtral", "olmoe"), _ALONE),
    **dict.fromkeys(("phimoe", "qwen3_moe", "qwen3_omni_moe", "qwen3_vl_moe"), _ALONE),
    **dict.fromkeys(("granitemoe_swa", "granitemoehybrid", "granitemoeshared"), _BESIDE),
    **dict.fromkeys(("jamba", "lfm2_moe"), _FEED_FORWARD),
    **dict.fromkeys(("qwen2_moe", "qwen3_5_moe", "qwen3_next"), _GATED),
    "dbrx": Family(output_saved_after=False),
    "diffusion_gemma": Family(head_left_alone="it denoises blocks of tokens, and computes no loss from labels"),
    "doge": Family(left_alone={"DogeCDMoE": "its experts are rows of an embedding table, looked up by each token"}),
    "ernie4_5_vl_moe": Family(dense="mlp"),
    "jetmoe": Family(left_alone={"JetMoeMoA": "its experts are the projections of attention"}),
    "llama4": Family(
        output_saved_after=False, shared_saved_after=False, shared=("shared_expert",), dense="feed_forward"
    ),
    "minimax": _ALONE,
    "muse_spark": Family(dense="mlp"),
    "nemotron_h": Family(shared=("shared_experts",)),
    "nllb-moe": Family(left_alone={"NllbMoeExperts": _CAPACITY}, head_left_alone=_ENCODER_DECODER),
    "qwen4_exp": Family(shared=("shared_expert",)),
    "step3p5": _ADDED,
    "switch_transformers": Family(
        left_alone={"SwitchTransformersExperts": _CAPACITY}, head_left_alone=_ENCODER_DECODER
    ),
}


def family_of(model_type: str) -> Family:
    """The row of a model type; the safe defaults for one that has none."""
    return FAMILIES.get(model_type.removesuffix("_text"), Family())
