"""Whole models under FSDP2 and expert parallelism on PipelinedLLEP: loss and gradients are those of one process."""

import pytest

FAMILIES = [
    "mixtral",
    "deepseek_v2",
    "deepseek_v3",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "olmoe",
    "glm4_moe",
    "ernie4_5_moe",
    "granitemoe",
]
DEFAULTS = {
    "family": "mixtral",
    "budget": 64 << 10,
    "kernel": "auto",
    "loaded_as": "pipelined_llep",
    "ep_size": 2,
    "checkpointing": "nonreentrant",
    "steps": 1,
}
TWO_RANKS = {
    **{family: {"family": family} for family in FAMILIES},
    "default caps, not patched": {"budget": None},
    "loaded with all_to_all": {"loaded_as": "all_to_all"},
    "no checkpointing": {"checkpointing": "off"},
    "re-entrant": {"checkpointing": "reentrant"},
    "accumulation": {"steps": 2},
    "shared experts, accumulation": {"family": "deepseek_v3", "steps": 2, "checkpointing": "off"},
    "the model's kernel": {"kernel": "model", "budget": 128 << 10},
}
FOUR_RANKS = {
    "efsdp 2": {},
    "efsdp 2, gpt_oss": {"family": "gpt_oss"},
    "efsdp 2, re-entrant": {"checkpointing": "reentrant"},
}
# Of "accumulation" there is one with shared experts too, and of "re-entrant" one on two ranks.
MORE = ["accumulation", "efsdp 2, re-entrant"]


@pytest.fixture(scope="module")
def two(launch, selected):
    cases = {name: {**DEFAULTS, **case} for name, case in selected(TWO_RANKS).items()}
    return launch("families_worker.py", 2, cases, timeout=180)


@pytest.fixture(scope="module")
def four(launch, selected):
    cases = {name: {**DEFAULTS, **case} for name, case in selected(FOUR_RANKS).items()}
    return launch("families_worker.py", 4, cases)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_a_model_on_two_ranks_is_exact(two, name):
    check(two, name, {**DEFAULTS, **TWO_RANKS[name]})


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_a_model_on_four_ranks_with_two_copies_of_each_expert_is_exact(four, name):
    check(four, name, {**DEFAULTS, **FOUR_RANKS[name]})


def check(found, name, case):
    for rank in found:
        result = rank[name]
        errors = result["errors"]
        assert len(errors) > 10 and max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])
        assert result["waves"], "no layer ran on the pipelined schedule"
        if case["budget"]:
            assert max(result["waves"]) > 1
            experts = [line for line in result["schedules"] if ".experts: dispatch" in line]
            assert experts and all("PipelinedLLEP" in line for line in experts)


def test_experts_were_lent_somewhere(two):
    assert any(sum(result["lent"]) for result in two[0].values())
