"""Two processes: the peaks are the maximum over ranks, on every rank."""

import json

from hf_longmoe.peaks import load_reports
from hf_longmoe.peaks.region import COMPONENTS


def test_peaks_are_the_maximum_over_ranks(launch, tmp_path):
    said = [rank["train"] for rank in launch("peaks_worker.py", 2, {"train": {"folder": str(tmp_path)}})]
    zero, one = load_reports(tmp_path / "rank0.json"), load_reports(tmp_path / "rank1.json")
    assert zero == one
    merged, ranks = zero["merged"], [zero["0"], zero["1"]]
    assert (merged.ranks, merged.steps) == (2, 1)
    assert merged.total == ranks[1].total > ranks[0].total
    for name in COMPONENTS:
        assert merged.components[name].peak == max(rank.components[name].peak for rank in ranks)
        assert merged.components[name].at_peak == ranks[1].components[name].at_peak
    for name, times in [("boundaries", 3), ("parameters", 1), ("gradients", 1)]:
        assert ranks[1].components[name].peak == times * ranks[0].components[name].peak > 0
    # The vocabulary's grow with the tokens too, the loss itself aside.
    assert 2.9 < ranks[1].components["vocab"].peak / ranks[0].components["vocab"].peak < 3

    history = [json.loads((tmp_path / f"history{rank}.json").read_text()) for rank in (0, 1)]
    assert [entry.get("peak/total_MiB") for entry in history[0]] == [
        entry.get("peak/total_MiB") for entry in history[1]
    ]
    assert [entry["step"] for entry in history[0] if "peak/total_MiB" in entry] == [3]
    assert load_reports(tmp_path / "peaks.json") == {"this run": merged}
    assert [rank.count("Peak bytes, this run (highest of 1 step and 2 ranks)") for rank in said] == [1, 0]
