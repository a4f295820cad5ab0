"""OffloadStreamAdamW on FSDP2 shards of two ranks: exactness, checkpoints, decisions."""

import pytest

MODES = ("accelerator", "cpu", "both", "auto")
EXACT = {
    **{f"{mode}, {dtype}": dict(update_on=mode, dtype=dtype) for mode in MODES for dtype in ("float32", "bfloat16")},
    "mixed meshes": dict(update_on="accelerator", mixed=True),
    "on the host": dict(cpu_offload=True),
    "on the host, bfloat16": dict(cpu_offload=True, dtype="bfloat16"),
    "early": dict(early=True),
}
RESUME = {f"resume, {name}": value for name, value in EXACT.items() if name != "mixed meshes"}
CASES = {
    **{f"exact, {name}": dict(kind="exact", **value) for name, value in EXACT.items()},
    **{name: dict(kind="resume", **value) for name, value in RESUME.items()},
    "plain": dict(kind="plain_there_and_back", update_on="both"),
    "taken over": dict(kind="taken_over"),
    "decided": dict(kind="decided_together", update_on="auto"),
}


@pytest.fixture(scope="module")
def found(launch):
    return launch("stream_adamw_worker.py", 2, CASES, timeout=250)


@pytest.mark.parametrize("name", EXACT)
def test_shards_are_updated_as_fused_adamw_would(found, name):
    for rank in found:
        result = rank[f"exact, {name}"]
        assert result["equal"] and result["moments"] and result["dtensors"]
        assert result["resynchronised"] == 0 and result["device_bytes"] == 0
        assert (result["sent"] > 0) == (not EXACT[name].get("cpu_offload"))
    if name != "mixed meshes":
        sizes = [rank[f"exact, {name}"]["sizes"] for rank in found]
        assert sizes[0] != sizes[1] and 0 in sizes[1]  # uneven, and empty


@pytest.mark.parametrize("name", RESUME)
def test_a_run_resumed_from_distributed_files_is_bitwise_equal(found, name):
    for rank in found:
        result = rank[name]
        assert result["equal"] and result["state"] and result["share"]
        assert result["lr"] == 1e-2 and result["files"] == 2


def test_to_and_from_a_plain_adamw(found):
    assert all(all(rank["plain"].values()) for rank in found)
    assert all(rank["taken over"]["equal"] for rank in found)


def test_all_ranks_decide_as_the_first(found):
    shares = [rank["decided"]["share"] for rank in found]
    assert shares[0] == shares[1] != 0.123
