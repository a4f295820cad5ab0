"""Expert parallelism that cannot work is refused with one clear error, on every rank, and no rank waits."""

import pytest

TP = {"fsdp_size": 1, "tp_size": 2, "ep_size": 2}
CASES = {
    "right": ({}, None),
    "experts that cannot be divided": ({"experts": 3}, ["3 experts", "2 expert-parallel ranks"]),
    "budget, at load": ({"environment": {"LONGMOE_DISPATCH_BUDGET": "1KiB"}}, ["dispatch.budget=1024", "at least"]),
    "budget, patched": ({"budget": "1KiB"}, ["dispatch.budget=1024", "at least"]),
    "budgets that differ": ({"budget": ["1MiB", "2MiB"]}, ["dispatch.budget", "same config on every rank"]),
    "experts in float16": ({"dtype": "float16", "budget": "1MiB"}, ["float16", "bfloat16 or float32"]),
    "experts in bfloat16": ({"dtype": "bfloat16", "budget": "1MiB"}, None),
    "one batch for a TP group": ({"sharding": TP, "budget": "1MiB"}, None),
    "a TP group given different batches": (
        {"sharding": TP, "budget": "1MiB", "other batches": True},
        ["[0, 1] are one tensor-parallel group (tp_size=2)", "different batches"],
    ),
    "an ep_plan without dispatch": (
        {"sharding": {"ep_plan": {"model.layers.*.mlp.experts": "local_params"}}, "budget": "1MiB"},
        ["patch_model: ep_size=2", "ep_dispatch_experts"],
    ),
}


@pytest.fixture(scope="module")
def said(launch):
    return launch("refusals_worker.py", 2, {name: case for name, (case, _) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_each_rank_says_why(said, name):
    words = CASES[name][1]
    for rank in said:
        if words is None:
            assert rank[name] is None
        else:
            assert rank[name] is not None and all(word in rank[name] for word in words), rank[name]
