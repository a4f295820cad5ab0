"""A small config of every MoE family of Transformers whose experts go through its experts interface.

Hidden 256, 8 experts of which a token takes two, and as many layers as show the family's pattern more than twice. What
a config does not have is not given to it; what only one family has, or wants otherwise, stands beside its name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["FAMILIES", "small_config"]

_LAYERS = 5
_COMMON: dict[str, Any] = dict(
    # the model
    vocab_size=2000,
    hidden_size=256,
    num_hidden_layers=_LAYERS,
    max_position_embeddings=8192,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=False,
    sliding_window=512,
    vocab_size_per_layer_input=2000,
    hidden_size_per_layer_input=32,
    # attention
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=64,
    swa_v_head_dim=64,
    # latent attention, and the indexer of a sparse one
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_rope_head_dim=32,
    qk_nope_head_dim=32,
    v_head_dim=64,
    index_n_heads=4,
    index_head_dim=64,
    index_topk=128,
    # experts and MLPs
    num_experts=8,
    num_local_experts=8,
    n_routed_experts=8,
    moe_num_experts=8,
    num_experts_per_tok=2,
    top_k_experts=2,
    moe_topk=2,
    n_group=1,
    topk_group=1,
    intermediate_size=512,
    moe_intermediate_size=128,
    n_shared_experts=1,
    num_shared_experts=1,
    moe_num_shared_experts=1,
    shared_intermediate_size=128,
    shared_expert_intermediate_size=128,
    moe_shared_expert_intermediate_size=128,
    router_hidden_size=64,
    first_k_dense_replace=1,
    num_dense_layers=1,
    # state-space and linear attention
    mamba_n_heads=8,
    mamba_d_head=64,
    mamba_n_groups=1,
    mamba_d_state=32,
    mamba_num_heads=8,
    mamba_head_dim=64,
    ssm_state_size=32,
    n_groups=1,
    linear_num_key_heads=4,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_head_dim=32,
    linear_num_heads=4,
)


def _dense_first(layers: int = _LAYERS) -> list[str]:
    return ["dense"] + ["sparse"] * (layers - 1)


def _alternating(*kinds: str, layers: int = 6) -> list[str]:
    return [kinds[i % len(kinds)] for i in range(layers)]


_ALL_HEADS = dict(num_key_value_heads=4)
_SLIDING = dict(num_hidden_layers=6, layer_types=_alternating("sliding_attention", "full_attention"))
_LINEAR = dict(num_hidden_layers=6, layer_types=_alternating("linear_attention", "full_attention"))
# One layer more than three of these: the first is dense, and so of a kind of its own.
_DENSE_SLIDING = dict(num_hidden_layers=7, layer_types=_alternating("sliding_attention", "full_attention", layers=7))
_DENSE_LINEAR = dict(num_hidden_layers=7, layer_types=_alternating("linear_attention", "full_attention", layers=7))
_RELATIVE = dict(unpadded_vocab_size=1990, sliding_window_size=512, d_rel=16, rel_extent=64)
# Vision and sound have no part in the step, and are as small as may be.
_VISION = dict(hidden_size=32, depth=2, num_heads=2, intermediate_size=64, out_hidden_size=256)
_TOWER = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
_SAM = dict(
    **{name: size for name, size in _TOWER.items() if name != "intermediate_size"},
    output_channels=16,
    image_size=64,
    global_attn_indexes=[1],
    downsample_channels=[16, 32],
)
_SOUND = dict(
    d_model=32,
    encoder_layers=2,
    encoder_attention_heads=2,
    encoder_ffn_dim=64,
    num_mel_bins=16,
    downsample_hidden_size=16,
    output_dim=256,
)
# By family: what its text has, beside `_COMMON`. "type" is its text's model type where that is not the family's name;
# "whole" its model's, with its other parts, where a text alone has no causal LM.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": _DENSE_SLIDING,
    "aria": dict(type="aria_text"),
    "axk1": {},
    "axk2": _ALL_HEADS,
    "bailing_hybrid": _DENSE_LINEAR | _ALL_HEADS,
    "beam": _DENSE_SLIDING | dict(mlp_layer_types=_dense_first(7)),
    "cohere2_moe": _SLIDING,
    "deepseek_ocr2": dict(
        type="deepseek_ocr2_text",
        whole=dict(
            model_type="deepseek_ocr2",
            vision_config=dict(sam_config=_SAM, encoder_config=dict(vocab_size=64, num_key_value_heads=2, **_TOWER)),
        ),
        mlp_layer_types=_dense_first(),
    ),
    "deepseek_v2": {},
    "deepseek_v3": {},
    "deepseek_v32": _ALL_HEADS,
    "deepseek_v4": dict(
        num_hidden_layers=8,
        mlp_layer_types=["hash_moe", "hash_moe", *["moe"] * 6],
        layer_types=_alternating("sliding_attention", "compressed_sparse_attention", layers=8),
        num_key_value_heads=1,
        o_groups=2,
        o_lora_rank=64,
    ),
    "diffusion_gemma": _SLIDING | dict(type="diffusion_gemma_text", whole=dict(model_type="diffusion_gemma")),
    "dots1": dict(sliding_window=None),
    "dots3_note": dict(type="dots3_note_text", shared_experts_intermediate_size=128, **_ALL_HEADS),
    "ernie4_5_moe": dict(moe_k=2),
    "ernie4_5_vl_moe": dict(
        type="ernie4_5_vl_moe_text",
        whole=dict(model_type="ernie4_5_vl_moe", vision_config=_VISION),
        moe_intermediate_size=[128, 128],
        moe_k=2,
        mlp_layer_types=_dense_first(),
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[11, 11, 10]),
    ),
    "exaone_moe": _DENSE_SLIDING,
    "flex_olmo": {},
    "flint": _DENSE_SLIDING | dict(mlp_only_layers=[0]),
    "gemma4": _SLIDING | dict(type="gemma4_text", enable_moe_block=True),
    "glm4_moe": {},
    "glm4_moe_lite": dict(head_dim=None),
    "glm4v_moe": dict(
        type="glm4v_moe_text",
        whole=dict(model_type="glm4v_moe", vision_config=_VISION),
        rope_parameters=dict(
            rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5, mrope_section=[8, 4, 4]
        ),
    ),
    "glm5_next": dict(
        type="glm5_next_text",
        whole=dict(model_type="glm5_next", vision_config=_VISION),
        num_hidden_layers=7,
        layer_types=_alternating("linear_attention", "indexed_attention", layers=7),
        mlp_layer_types=_dense_first(7),
        qk_rope_head_dim=0,
        qk_nope_head_dim=64,
        head_dim=0,
        index_kpool=4,
        **_ALL_HEADS,
    ),
    "glm_moe_dsa": _ALL_HEADS,
    "gpt_oss": _SLIDING,
    "granitemoe": {},
    "granitemoe_swa": _SLIDING,
    "granitemoehybrid": dict(num_hidden_layers=6, layer_types=_alternating("mamba", "attention")),
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": _ALL_HEADS,
    "hy_v4_vl": dict(
        type="hy_v4_vl_text",
        whole=dict(model_type="hy_v4_vl", vision_config=_TOWER),
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[6, 5, 5]),
        **_ALL_HEADS,
    ),
    "inkling": dict(type="inkling_text", dense_intermediate_size=512, **_RELATIVE),
    "inkling2": dict(type="inkling2_text", n_layers_per_attn_res_block=1, **_RELATIVE),
    "inkling2_loop": dict(
        type="inkling2_loop_text",
        loop_layer_index_start=1,
        loop_layer_index_end=2,
        loop_num_passes=2,
        loop_gate_rank=32,
        n_layers_per_attn_res_block=1,
        **_RELATIVE,
    ),
    "jamba": dict(
        num_hidden_layers=6,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=16,
        mamba_dt_rank=16,
    ),
    "kimi_linear": _DENSE_LINEAR,
    "kolibri1": _SLIDING,
    "laguna": _DENSE_SLIDING,
    "lara_mini": dict(num_hidden_layers=6, layer_types=_alternating("linear_attention", "full_attention")),
    "lfm2_moe": dict(num_hidden_layers=7, layer_types=_alternating("conv", "full_attention", layers=7)),
    "mellum": _SLIDING,
    "mimo_v2_flash": {},
    "minimax": _LINEAR | dict(sliding_window=None),
    "minimax_m2": {},
    "minimax_m3_vl": dict(type="minimax_m3_vl_text"),
    "mistral4": {},
    "mistral_large4": dict(
        type="mistral_large4_text",
        whole=dict(model_type="mistral_large4", vision_config=dict(model_type="pixtral", head_dim=16, **_TOWER)),
        **_ALL_HEADS,
    ),
    "mixtral": dict(sliding_window=None),
    "muse_spark": _DENSE_SLIDING
    | dict(
        type="muse_spark_text",
        whole=dict(
            model_type="muse_spark",
            vision_config=dict(pos_emb_height=4, pos_emb_width=4, **_TOWER),
            audio_config=dict(
                hidden_sizes=[8, 16], patch_sizes=[16, 6], depths=[1, 1], num_hidden_layers=2, out_hidden_size=256
            ),
            out_hidden_size=256,
            projector_hidden_size=32,
        ),
        moe_hidden_size=192,
        mlp_layer_types=_dense_first(7),
    ),
    "nemotron_h": dict(num_hidden_layers=None, layers_block_type=["mamba", "moe", "attention", "moe"] * 3),
    "olmoe": {},
    "openai_privacy_filter": {},
    "phimoe": dict(sliding_window=None),
    "qwen2_moe": {},
    "qwen3_5_moe": _LINEAR | dict(type="qwen3_5_moe_text"),
    "qwen3_moe": {},
    "qwen3_next": _LINEAR,
    "qwen3_omni_moe": dict(
        type="qwen3_omni_moe_text",
        sliding_window=None,
        whole=dict(
            model_type="qwen3_omni_moe_thinker", vision_start_token_id=3, vision_config=_VISION, audio_config=_SOUND
        ),
    ),
    "qwen3_vl_moe": dict(type="qwen3_vl_moe_text", whole=dict(model_type="qwen3_vl_moe", vision_config=_VISION)),
    "qwen4_exp": _LINEAR
    | dict(
        type="qwen4_exp_text",
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=64,
        indexer_budget=128,
        indexer_compress_ratio=4,
    ),
    "solar_open": {},
    "unlimited_ocr": dict(
        type="unlimited_ocr_text",
        whole=dict(
            model_type="unlimited_ocr",
            vision_config=dict(sam_config=_SAM, encoder_config=dict(image_size=64, patch_size=16, **_TOWER)),
        ),
        mlp_layer_types=_dense_first(),
    ),
    "zaya": dict(num_experts_per_tok=1, sliding_window=None),
}


def small_config(family: str, **sizes: Any) -> PreTrainedConfig:
    """
    The family's small config, of which `planning_shape.build` makes a causal LM.

    Arguments:
        sizes: in place of the common ones, where the family's config has them.
    """
    values = dict(FAMILIES[family])
    whole, kind = values.pop("whole", None), CONFIG_MAPPING[values.pop("type", family)]
    known = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    common = {name: value for name, value in {**_COMMON, **sizes}.items() if name in known}
    text = kind(**{name: value for name, value in {**common, **values}.items() if value is not None})
    return text if whole is None else AutoConfig.for_model(**whole, text_config=text)
