"""Ranks that share sequences, against one process: loss, every gradient, evaluation, and what is left alone."""

import pytest

FLOAT32_ROUTERS = ("deepseek_v2", "deepseek_v3", "glm4_moe", "ernie4_5_moe")
FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "granitemoe")
PLAIN = {"family": "mixtral", "batch": "plain", "length": 20, "cp": 2}
TWO = {
    **{family: {**PLAIN, "family": family, "length": 19} for family in (*FAMILIES, "ernie4_5_moe", "llama")},
    "padded": {**PLAIN, "batch": "padded"},
    "packed": {**PLAIN, "batch": "packed", "length": 21},
    "masked labels": {**PLAIN, "batch": "masked"},
    "a sliding window": {**PLAIN, "config": {"sliding_window": 6}},
    "a sliding window, packed": {**PLAIN, "batch": "packed", "config": {"sliding_window": 6}},
    "some layers with a window": {
        **PLAIN,
        "family": "qwen3",
        "config": {
            "intermediate_size": 24,
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    },
    "checkpointed, two forwards": {**PLAIN, "batch": "packed", "forwards": 2, "checkpointing": "on"},
    "re-entrant, two forwards": {**PLAIN, "batch": "packed", "forwards": 2, "checkpointing": "reentrant"},
    "not patched": {**PLAIN, "batch": "packed", "checkpointing": "on", "forwards": 2, "patched": False},
}
FOUR = {
    "cp 4": {**PLAIN, "cp": 4, "length": 22},
    "cp 4, packed": {**PLAIN, "cp": 4, "batch": "packed", "length": 21},
    "cp 4, padded, checkpointed": {**PLAIN, "cp": 4, "batch": "padded", "length": 23, "checkpointing": "on"},
    "cp 2 x 2 groups": {**PLAIN, "batch": "padded", "length": 21},
    "cp 2 x 2 groups, packed": {**PLAIN, "batch": "packed", "checkpointing": "on", "forwards": 2},
}


@pytest.fixture(scope="module")
def two(launch):
    return launch("sequences_worker.py", 2, TWO, timeout=200)


@pytest.fixture(scope="module")
def four(launch):
    return launch("sequences_worker.py", 4, FOUR, timeout=200)


def exact(found, case):
    tolerance = 1e-12 if case.get("patched", True) else 1e-6  # the stock loss is computed in float32
    of_gradients = 1e-6 if case["family"] in FLOAT32_ROUTERS else tolerance
    for rank in found:
        assert rank["loss"] < tolerance and rank["gradients"] < of_gradients and rank["evaluation"] < tolerance, rank
        assert rank["alone"] < 1e-12 and rank["generated"] and rank["removed"] < tolerance, rank
        assert rank["implementation"] == "sdpa"


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(two, name):
    exact([rank[name] for rank in two], TWO[name])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(four, name):
    exact([rank[name] for rank in four], FOUR[name])
