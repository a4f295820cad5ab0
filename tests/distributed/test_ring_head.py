"""An LM head that no rank gathers (Ring-DTP under FSDP2): losses, gradients, evaluation and saving are stock's."""

import pytest

DEFAULTS = {
    "family": "mixtral",
    "config": {},
    "tied": False,
    "sharding": {},
    "own group": True,
    "schedule": "auto",
    "z_loss": 0.0,
    "one masked": False,
    "items": None,
    "shifted": False,
    "steps": 1,
}
TP = {"tp_size": 2}
TWO_RANKS = {
    "ring": {},
    "accumulation": {"steps": 2},
    "a rank with every label masked": {"one masked": True},
    "num_items_in_batch": {"items": 17},
    "shift_labels": {"shifted": True},
    "z-loss": {"z_loss": 0.01},
    "granite: logits divided": {"family": "granitemoe", "config": {"logits_scaling": 4.0}},
    "num_items_in_batch, shift_labels": {"items": 17, "shifted": True},
    "granite: logits divided, z-loss": {"family": "granitemoe", "config": {"logits_scaling": 4.0}, "z_loss": 0.01},
    "head gathered with the norm": {"own group": False},
    "tied": {"tied": True, "own group": False},
    "tensor parallel": {"sharding": TP, "own group": False, "steps": 2},
    "tensor parallel, tied, masked, items": {"sharding": TP, "own group": False, "tied": True, "items": 17},
    "tensor parallel, z-loss, scaled": {
        **{"sharding": TP, "own group": False, "z_loss": 0.01, "shifted": True},
        **{"family": "granitemoe", "config": {"logits_scaling": 4.0}},
    },
}
FOUR_RANKS = {
    "four ranks": {},
    "HSDP": {"sharding": {"fsdp_size": 2, "dp_replicate_size": 2}},
    "FSDP2 and tensor parallel": {"sharding": TP, "own group": False},
    "FSDP2 and tensor parallel, own group": {"sharding": TP},
}
REFUSED = {
    "ring forced, head gathered": {"schedule": "ring", "own group": False},
    "ring forced, tied": {"schedule": "ring", "tied": True, "own group": False},
    "ring forced, tensor parallel": {"schedule": "ring", "sharding": TP, "own group": False},
}


MORE = ["num_items_in_batch", "shift_labels", "z-loss", "granite: logits divided"]  # in `make test` two at once


@pytest.fixture(scope="module")
def two(launch, selected):
    cases = {name: {**DEFAULTS, **case} for name, case in selected({**TWO_RANKS, **REFUSED}).items()}
    return launch("ring_head_worker.py", 2, cases, timeout=180)


@pytest.fixture(scope="module")
def four(launch):
    return launch("ring_head_worker.py", 4, {name: {**DEFAULTS, **case} for name, case in FOUR_RANKS.items()})


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(two, name):
    check(two, name, 65, {**DEFAULTS, **TWO_RANKS[name]})


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks(four, name):
    check(four, name, 65 if name == "HSDP" else 33, {**DEFAULTS, **FOUR_RANKS[name]})


def check(found, name, entries, case):
    for rank in found:
        result = rank[name]
        errors = result["errors"]
        assert len(errors) > 10 and max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])
        assert result["evaluation"] < 1e-5 and result["saved"] and result["restored"]
        (line,) = result["report"]
        used, budget, beside = result["working"]
        assert 0 < used <= budget + beside or "left alone" in line, result["working"]
        if "tp_size" in case["sharding"] and case["own group"]:
            assert "left alone (FSDP2 frees the gathered weight" in line
        elif "tp_size" in case["sharding"]:
            assert "vocab, divided tiles (" in line and "2 tensor-parallel ranks" in line
        elif case["own group"]:
            assert "vocab, ring (" in line and result["entries held"] <= entries
        elif case["tied"]:
            assert "vocab, tiles (" in line and "tied" in line
        else:
            assert "vocab, tiles (" in line and 'fsdp_plan={"lm_head": "free_full_weight"}' in line


ONE_RANK = {
    "one": {"sharding": {"fsdp_size": 1, "ep_size": 1}, "own group": False},
    "one, forced": {"sharding": {"fsdp_size": 1, "ep_size": 1}, "schedule": "ring"},
}


def test_a_process_group_of_one(launch):
    (rank,) = launch("ring_head_worker.py", 1, {name: {**DEFAULTS, **case} for name, case in ONE_RANK.items()})
    assert max(rank["one"]["errors"].values()) < 1e-5 and "vocab, tiles (" in rank["one"]["report"][0]
    assert "weight is not divided" in rank["one, forced"]["refused"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_ring_that_is_forced_and_cannot_be_is_refused_with_the_reason(two, name):
    for rank in two:
        assert 'vocab.schedule="ring"' in rank[name]["refused"]
        assert ("tied" in rank[name]["refused"]) == ("tied" in name)
