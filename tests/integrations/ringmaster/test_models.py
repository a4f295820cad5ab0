"""Models that cannot share their sequences exactly are refused by name, and nothing is changed."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_longmoe import LongMoEConfig, VocabConfig, patch_model
from hf_longmoe.integrations.ringmaster.models import check_shareable

SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
EXPERTS = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
ROPE = {"rope_theta": 1e4, "factor": 2.0, "rope_type": "dynamic"}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_mscale": 1.0, "long_mscale": 1.0}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [1.5] * 4, "original_max_position_embeddings": 64}
REFUSED = {
    "heads": ("mixtral", dict(num_key_value_heads=2), 4, r"num_key_value_heads=2, which 4 ranks.*one of \[1, 2\]"),
    "query heads": ("mixtral", dict(num_key_value_heads=4), 3, r"num_attention_heads=4, which 3 ranks.*one of \[1\]"),
    "linear attention": (
        "qwen3_next",
        dict(num_key_value_heads=2),
        2,
        r"mix tokens in another way \(linear_attention",
    ),
    "short convolutions": (
        "lfm2_moe",
        dict(num_key_value_heads=2, layer_types=["conv", "full_attention"]),
        2,
        r"in another way \(conv",
    ),
    "a state": ("jamba", dict(num_key_value_heads=2), 2, "mix tokens in another way"),
    "dynamic rotary": (
        "mixtral",
        dict(num_key_value_heads=2, head_dim=8, rope_parameters=ROPE),
        2,
        'of type "dynamic"',
    ),
    "long rotary": (
        "phimoe",
        dict(num_key_value_heads=2, rope_parameters=LONG),
        2,
        'of type "longrope"',
    ),
    "sinks": (
        "gpt_oss",
        dict(num_key_value_heads=2, head_dim=8),
        2,
        'attn_implementation="eager".*load it with "sdpa"',
    ),
}


def model_of(family, options):
    config = AutoConfig.for_model(family, **{**SMALL, **EXPERTS, **options})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    family, options, size, message = REFUSED[name]
    model = model_of(family, options)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message) as caught:
        check_shareable(model, size)
    assert f"ParallelismConfig.cp_size={size}: {type(model).__name__}" in str(caught.value)
    assert model.config._attn_implementation == before


def test_sinks_under_another_implementation():
    model = model_of("gpt_oss", dict(num_key_value_heads=2, head_dim=8))
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=r"attention sinks \(model\.layers\.0\.self_attn\)"):
        check_shareable(model, 2)


def test_text_of_a_model_that_sees():
    config = AutoConfig.for_model("qwen3_vl_moe")
    with torch.device("meta"):
        config.text_config.num_hidden_layers = config.vision_config.depth = 1
        model = AutoModelForImageTextToText.from_config(config)
    with pytest.raises(ValueError, match="is not a decoder of text alone"):
        check_shareable(model, 2)


def test_a_loss_of_its_own():
    model = model_of("mixtral", dict(num_key_value_heads=2))
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    with pytest.raises(ValueError, match="does not compute its loss with ForCausalLMLoss"):
        check_shareable(model, 2)


def test_a_patched_model_is_welcome():
    config = AutoConfig.for_model("mixtral", **{**SMALL, **EXPERTS}, num_key_value_heads=2)
    model = patch_model(AutoModelForCausalLM.from_config(config), LongMoEConfig(vocab=VocabConfig(budget="64KiB")))
    check_shareable(model, 2)
