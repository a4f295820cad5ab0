"""The Trainer on two ranks with `LongMoEPlugin`: the bits of the run without it, its bytes bounded."""

import pytest

KINDS = ("ddp", "ep")
CASES = {
    **{kind: {"kind": kind, "plugin": False, "update_on": "auto"} for kind in KINDS},
    **{
        f"{kind}, {on}": {"kind": kind, "plugin": True, "update_on": on}
        for kind in KINDS
        for on in ("accelerator", "cpu", "both")
    },
}

FSDP2 = {
    "stock": {"plugin": False, "patched": False},
    "plugin alone": {"plugin": True, "patched": False},
    "patch alone": {"plugin": False, "patched": True},
    "both": {"plugin": True, "patched": True},
    "stock, tied": {"plugin": False, "patched": False, "tied": True},
    "both, tied": {"plugin": True, "patched": True, "tied": True},
}


MORE = ["ddp, accelerator", "ddp, both", "ep, cpu", "patch alone"]  # each way of updating is there once


@pytest.fixture(scope="module")
def two(launch, selected):
    cases = {**CASES, **{name: {"kind": "fsdp2", **case} for name, case in FSDP2.items()}}
    return launch("plugin_worker.py", 2, selected(cases), timeout=280)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["plugin"]])
def test_the_same_training(two, name):
    kind = name.partition(",")[0]
    for rank in two:
        got, want = rank[name], rank[kind]
        assert len(want["losses"]) == 4 and len(set(want["losses"])) == 4
        assert (got["losses"], got["norms"], got["weights"]) == (want["losses"], want["norms"], want["weights"])
        # Of two micro-batches a step each forward has four boundaries; the last stays. 16 KiB is a slot.
        assert got["offloaded"] == 3 and 0 < got["staging"] <= 2 * 16384 + 3 * 20 * 32 * 4 and got["sent"] > 0
        assert got["host"] == got["device"] == 0


@pytest.mark.parametrize("name", FSDP2)
def test_accelerates_own_fsdp2(two, name):
    """Layers in torch's CheckpointWrapper, a head that the plugin keeps divided, DCP checkpoints."""
    case = FSDP2[name]
    for rank in two:
        got, want = rank[name], rank["stock, tied" if "tied" in name else "stock"]
        assert got["resumed"], "after load_state it goes another way than before"
        if case["patched"]:
            assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
            (head,) = got["head"]
            assert ("vocab, ring (" in head) == (name == "both") and ("vocab, tiles (" in head) == (name != "both")
        else:
            assert got["losses"] == want["losses"]
        if case["plugin"]:
            assert got["offloaded"] == 3 and got["host"] == 0
