"""Ranks that share sequences, against one process: loss, every gradient, evaluation, and what is left alone."""

import re

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
    "aux": {
        **PLAIN,
        "batch": "padded",
        "length": 19,
        "config": {"output_router_logits": True, "router_aux_loss_coef": 0.5},
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


LOOPS = ("stock", "stock lora", "ddp", "patched", "fsdp2", "lora")
REFUSED = {
    "left padding": "the batch of rank 3 cannot be divided: its attention_mask is not .* padding on the right",
    "short": "the batch of rank 3 cannot be divided: its 1 tokens are fewer than cp_size",
    "another batch": r"Ranks \[2, 3\] share their sequences .* but were given different batches",
    "a longer batch": r"Ranks \[2, 3\] share their sequences .* but were given different batches",
    "no input_ids": "the batch of rank 3 cannot be divided: it has no input_ids",
    "no labels": "the batch of rank 3 cannot be divided: it has no labels; give the model its labels",
    "the heads": "num_key_value_heads=1, which 2 ranks cannot divide",
    "windows that differ": "Qwen3MoeAttention has a sliding window of 7, and a mask for 5",
    "a router's loss, not patched": r"auxiliary loss of each rank's part alone; patch_model\(model\)",
    "a layer without attention": "1 of 2 layers of MixtralForCausalLM have used Transformers' attention interface",
}


MORE = [
    "olmoe",
    "glm4_moe",
    "qwen2_moe",
    "deepseek_v2",
    "a sliding window",
    "cp 4",
]  # like "qwen3_moe", "deepseek_v3", and those packed too


@pytest.fixture(scope="module")
def two(launch, selected):
    loops = {f"loop, {kind}": {"loop": kind} for kind in LOOPS}
    return launch("sequences_worker.py", 2, selected({**TWO, **loops}), timeout=200)


@pytest.fixture(scope="module")
def four(launch, selected):
    return launch("sequences_worker.py", 4, selected({**FOUR, "refused": {"refused": True, "cp": 2}}), timeout=200)


def exact(found, case):
    # The stock loss, and its auxiliary one, are computed in float32.
    tolerance = 1e-12 if case.get("patched", True) and "output_router_logits" not in case.get("config", {}) else 1e-6
    of_gradients = 1e-6 if case["family"] in FLOAT32_ROUTERS else tolerance
    for rank in found:
        assert rank["loss"] < tolerance and rank["gradients"] < of_gradients and rank["evaluation"] < tolerance, rank
        assert rank["alone"] < 1e-12 and rank["generated"] and rank["removed"] < tolerance, rank
        assert rank["implementation"] == "sdpa" and not rank["saved"]


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(two, name):
    exact([rank[name] for rank in two], TWO[name])


@pytest.mark.parametrize("kind", [kind for kind in LOOPS if not kind.startswith("stock")])
def test_a_plain_loop(two, kind):
    """With no more than another `parallelism_config`: the mean over ranks of their losses is what it was."""
    for rank in two:
        got, want = rank[f"loop, {kind}"], rank["loop, stock lora" if kind == "lora" else "loop, stock"]
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-5) and len(set(want["losses"])) == 2
        assert got["weights"] == pytest.approx(want["weights"], rel=1e-5) and got["given back"]


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse(four, name):
    for rank in four:
        assert re.search(REFUSED[name], rank["refused"][name] or "not at all"), rank["refused"][name]
        assert rank["refused"]["after"]


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(four, name):
    exact([rank[name] for rank in four], FOUR[name])
