"""A small config of every MoE family of Transformers whose experts do not go through its experts interface."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

__all__ = ["OWN_BLOCKS", "small_own_block"]

_TEXT: dict[str, Any] = dict(
    vocab_size=2000,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=False,
)
_SEQ2SEQ: dict[str, Any] = dict(
    vocab_size=2000,
    decoder_start_token_id=0,
    d_model=64,
    d_ff=48,
    num_layers=4,
    num_decoder_layers=4,
    num_heads=4,
    d_kv=16,
    num_experts=8,
)
OWN_BLOCKS: dict[str, dict[str, Any]] = {
    "dbrx": dict(
        vocab_size=2000,
        d_model=64,
        n_heads=4,
        n_layers=3,
        max_seq_len=64,
        use_cache=False,
        pad_token_id=0,
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
        ffn_config=dict(hidden_size=64, ffn_hidden_size=24, moe_num_experts=8, moe_top_k=2),
    ),
    "doge": _TEXT | dict(is_moe=True, num_experts=64, num_experts_per_tok=4),
    "jetmoe": _TEXT | dict(kv_channels=16, num_local_experts=8, num_experts_per_tok=2),
    "llama4": _TEXT
    | dict(
        model_type="llama4_text",
        intermediate_size_mlp=48,
        num_local_experts=8,
        num_experts_per_tok=2,
        moe_layers=[1, 3],
        attention_chunk_size=16,
    ),
    "longcat_flash": _TEXT
    | dict(
        num_hidden_layers=None,
        intermediate_size=None,
        num_layers=2,
        num_key_value_heads=4,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=24,
        n_routed_experts=6,
        zero_expert_num=2,
        moe_topk=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    ),
    "nllb_moe": dict(
        model_type="nllb-moe",
        vocab_size=2000,
        d_model=64,
        encoder_layers=4,
        decoder_layers=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        num_experts=8,
    ),
    "step3p7": dict(
        text_config=_TEXT
        | dict(
            moe_intermediate_size=24,
            share_expert_dim=24,
            num_local_experts=8,
            n_routed_experts=8,
            num_experts_per_tok=2,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            sliding_window=16,
            swiglu_limits=[0.0, 0.0, 0.05, 0.05],
        ),
        vision_config=dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64),
    ),
    "switch_transformers": _SEQ2SEQ,
}


def small_own_block(family: str) -> PreTrainedConfig:
    """The family's small config."""
    values = {"model_type": family} | OWN_BLOCKS[family]
    return AutoConfig.for_model(**{name: value for name, value in values.items() if value is not None})
