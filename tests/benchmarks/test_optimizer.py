"""`python -m benchmarks optimizer`, and its simulated link; nothing here depends on how fast anything is."""

import json

import jsonschema
import pytest
import torch

from benchmarks import report
from benchmarks.link import LinkEngine
from benchmarks.optimizer import LinkSizes, UpdateSizes, cases


@pytest.mark.parametrize("only", ("update", "link"))
def test_quick_run(python, only, tmp_path):
    file = tmp_path / "out.json"
    command = ["-m", "benchmarks", "optimizer", "--quick", "--only", only, "--threads", 1]
    done = python(*command, "--json", file, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    jsonschema.validate(result, report.SCHEMA)
    assert len(result["cases"]) == (4 if only == "update" else 2)
    for entry in result["cases"]:
        assert not entry["gate"] and not report.missed(entry)
        assert entry["wall_ratio"] > 0 and entry["error"] < (1e-6 if only == "update" else 5e-3)
        if only == "link":
            assert entry["bound_seconds"] == pytest.approx(max(entry["stage_seconds"].values()) / 0.9)
            assert 1 < entry["bound"] <= 4
            assert (entry["accelerator_share"] is None) == entry["case"].startswith("cpu")
        else:
            assert entry["bytes_per_element"] == 28 and entry["buckets"] > 1


def test_the_gates_are_those_promised():
    known = cases(quick=False)
    assert len({case.name for case in known}) == len(known) and all(case.gate for case in known)
    updates = {case.sizes.against: case.limits for case in known if isinstance(case.sizes, UpdateSizes)}
    assert updates.keys() == {"foreach", "for-loop", "bandwidth"}
    assert updates["bandwidth"] == {"wall_ratio": 1 / 0.85}
    links = {case.sizes.update_on: case for case in known if isinstance(case.sizes, LinkSizes)}
    assert links["cpu"].limits == {"wall_seconds": "bound_seconds"}
    assert links["both"].limits == {"wall_ratio": 1 / 1.25}
    sizes = links["both"].sizes
    assert 12 / sizes.link == pytest.approx(1 / sizes.host)  # equally fast


def test_the_link_keeps_order_and_takes_its_time():
    engine = LinkEngine(rate=1e6)
    device, host, back = torch.arange(1000.0), torch.zeros(1000), torch.zeros(1000)
    down = engine.down(host, device)
    engine.compute_waits(down)
    engine.run(lambda: device.zero_())
    up = engine.up(back, host)
    engine.idle()
    assert engine.done(up) and torch.equal(back, torch.arange(1000.0)) and not device.any()
    assert down.seconds() == up.seconds() == 0.004
    bad = engine.up(back, torch.zeros(3))
    with pytest.raises(RuntimeError, match="a job of the simulated device failed"):
        engine.finish(bad)
    engine.close()
