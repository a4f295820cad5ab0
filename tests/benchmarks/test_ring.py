"""`python -m benchmarks ring`; nothing here depends on how fast anything is."""

import json

import jsonschema
import pytest

from benchmarks import report
from benchmarks.ring import cases
from hf_longmoe.schedules.vocab.ring_plan import ring_bytes


@pytest.mark.parametrize("only", ["2 ranks, N 256, H 32, V 1024", "4 ranks, N 2048"])
def test_quick_run(python, only, tmp_path):
    file = tmp_path / "out.json"
    done = python("-m", "benchmarks", "ring", "--quick", "--only", only, "--json", file, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    jsonschema.validate(result, report.SCHEMA)
    assert result["environment"]["threads"] == 1
    entries = {case["case"]: case for case in result["cases"]}
    assert len(entries) == (5 if "N 256" in only else 2)  # with the one that a limit comes from
    for name, case in entries.items():
        assert not case["gate"] and not report.missed(case)
        assert (case["wall_ratio"] is None) == ("4 ranks" in name)
        assert 0 < case["error"] < 1e-5 and 0 < case["baseline_error"] < 1e-5
        assert 0 < case["beside_peak_bytes"] <= case["bound_bytes"] == case["limits"]["beside_peak_bytes"]
    if "N 256" in only:
        plain = entries["2 ranks, N 256, H 32, V 1024, 256KiB"]
        rows = ring_bytes("tokens", 256, 32, 2, 4, 4)
        assert rows < plain["sent_bytes"] < 1.3 * rows  # and labels, statistics and one gather
    else:
        few, many = (entries[f"4 ranks, N {tokens}, H 32, V 1024, 256KiB"] for tokens in (256, 2048))
        assert many["growth"]["bytes_per_unit"] == (many["peak_bytes"] - few["peak_bytes"]) / (2048 - 256)


def test_the_gates_are_those_promised():
    known = cases(quick=False)
    assert len({case.name for case in known}) == len(known)
    gates = [case for case in known if case.gate]
    times = {(case.sizes.frozen, case.sizes.backward): case.limits.get("wall_ratio") for case in gates if case.timed}
    assert times == {(False, True): 1.35, (False, False): 1.05, (True, True): 1.0}
    assert all(case.sizes.ranks == 2 for case in gates if case.timed)
    saved = [case.sizes for case in gates if case.limits.get("peak_saved") == 0.97]
    assert [(sizes.ranks, sizes.tokens) for sizes in saved] == [(4, 16_384)]
    assert all(case.limits["beside_peak_bytes"] == "bound_bytes" for case in gates)
    grows = {(case.sizes.ranks, case.sizes.tokens, case.sizes.vocab) for case in gates if case.grows_from}
    assert grows >= {(2, 16_384, 32_768), (4, 16_384, 32_768), (2, 2048, 65_536), (4, 2048, 65_536)}
    assert all(
        case.grows_from.slack == 0.02 and case.grows_from.bytes_per_unit <= 16 for case in gates if case.grows_from
    )
