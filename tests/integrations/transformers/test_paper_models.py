"""The smallest model of arXiv 2609.14306: what ends an unscheduled run, and that the schedules reach 1M tokens."""

import dataclasses

import pytest
from transformers import AutoConfig

from hf_longmoe import Layout, LongMoEConfig
from hf_longmoe.integrations.transformers.planning import Planner
from hf_longmoe.planner.caps import NOTHING

RANKS, LIMIT = 16, int(141e9 * 0.92)


@pytest.fixture(scope="module")
def planner(short_counts):
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=7168,
        num_hidden_layers=7,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        num_experts=384,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        mlp_only_layers=[],
        vocab_size=200_000,
    )
    return Planner(config, Layout(seq_len=2**20, world_size=RANKS, ep_size=RANKS, cp_size=RANKS))


@pytest.mark.slow
@pytest.mark.parametrize(("imbalance", "ends"), [(1.3, "vocab"), (RANKS, "dispatch")])
def test_what_ends_a_run_and_that_the_schedules_reach_a_million_tokens(planner, imbalance, ends):
    planner.layout = dataclasses.replace(planner.layout, imbalance=imbalance)
    assert 120e9 < planner.shape.parameters < 123e9
    longest = planner.longest(LIMIT)
    beyond = dataclasses.replace(planner.layout, seq_len=longest + 256)
    assert longest < 2**19 and planner.unbounded(beyond).total > LIMIT
    assert planner.unbounded(beyond).largest == ends
    if ends == "dispatch":  # all rows to one rank: the order of the paper's 128K
        assert 2**16 <= longest < 2**17
    assert planner.at_most(NOTHING) > LIMIT
    assert planner.at_most(LongMoEConfig()) <= LIMIT
