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


@pytest.fixture(scope="module")
def two(launch):
    return launch("plugin_worker.py", 2, CASES, timeout=200)


@pytest.mark.parametrize("name", [name for name in CASES if "," in name])
def test_the_same_training(two, name):
    kind = name.partition(",")[0]
    for rank in two:
        got, want = rank[name], rank[kind]
        assert len(want["losses"]) == 4 and len(set(want["losses"])) == 4
        assert (got["losses"], got["norms"], got["weights"]) == (want["losses"], want["norms"], want["weights"])
        # Of two micro-batches a step each forward has four boundaries; the last stays. 16 KiB is a slot.
        assert got["offloaded"] == 3 and 0 < got["staging"] <= 2 * 16384 + 3 * 20 * 32 * 4 and got["sent"] > 0
        assert got["host"] == got["device"] == 0
