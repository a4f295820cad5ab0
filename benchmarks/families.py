"""A small config of every MoE family of Transformers whose experts go through its experts interface.

Hidden 256, 8 experts of which a token takes two, and as many layers as show the family's pattern more than twice. What
a config does not have is not given to it; what only one family has, or wants otherwise, stands beside its name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["FAMILIES", "UNBUILDABLE", "small_config"]

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
)
