"""LoRA on experts divided over ranks: loss, gradients and the saved adapter are those of stock PEFT on one process."""

import pytest

DEFAULTS = {
    "family": "qwen3_moe",
    "ep_size": 2,
    "loaded_as": "pipelined_llep",
    "sharded": True,
    "modules": ["q_proj"],
    "saved": None,
    "ring": False,
    "checkpointing": False,
    "trainer": False,
}
TWO_RANKS = {
    "qwen3_moe": {},
    "gpt_oss": {"family": "gpt_oss", "modules": [], "checkpointing": True, "loaded_as": "all_to_all", "ring": True},
    "every rank has all factors": {"sharded": False, "modules": ["q_proj", "lm_head"], "checkpointing": True},
    "FSDP2 alone": {"ep_size": 1, "loaded_as": "auto", "sharded": False},
    "a Trainer": {"trainer": True},
}


@pytest.fixture(scope="module")
def two(launch):
    cases = {name: {**DEFAULTS, **case} for name, case in TWO_RANKS.items()}
    return launch("lora_worker.py", 2, cases, timeout=180)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(two, name):
    check(two, name, {**DEFAULTS, **TWO_RANKS[name]})


@pytest.mark.exhaustive
def test_two_copies_of_each_expert_on_four_ranks(launch):
    cases = {"divided": DEFAULTS, "whole": {**DEFAULTS, "sharded": False}}
    found = launch("lora_worker.py", 4, cases)
    for name, case in cases.items():
        check(found, name, case)


def check(found, name, case):
    for rank in found:
        result = rank[name]
        errors = result["errors"]
        assert len(errors) > 10 and max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])
        shares = {whole / here for here, whole in result["shapes"].values()}
        assert shares == {case["ep_size"] if case["sharded"] else 1}
        experts = [line for line in result["schedules"] if ".experts." in line]
        schedule = "PipelinedLLEP" if case["ep_size"] > 1 else "expert-major waves"
        assert experts and all(schedule in line and "LoRA by expert" in line for line in experts)
        assert any("vocab, ring" in line for line in result["schedules"]) == case["ring"]
        if not case["trainer"] and case["ep_size"] > 1:
            assert max(result["waves"]) > 1 and sum(result["lent"])
