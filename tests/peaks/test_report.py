import io
import json
import sys

import jsonschema
import pytest
import torch

from hf_longmoe.peaks import ComponentPeak, PeakReport, StorageProbe, component, load_reports, save_reports
from hf_longmoe.peaks.plot import plot_reports
from hf_longmoe.peaks.region import COMPONENTS, PHASES
from hf_longmoe.peaks.report import merge_ranks
from hf_longmoe.peaks.schema import PEAKS_SCHEMA
from hf_longmoe.peaks.table import print_reports


def made(**at_peak: int) -> PeakReport:
    """A report whose components hold these bytes at the total peak, and 10 more at their own."""
    parts = {
        name: ComponentPeak(peak=n + 10 * bool(n), at_peak=n, working=n // 2, phases={"forward": n})
        for name in COMPONENTS
        for n in [at_peak.get(name, 0)]
    }
    total = sum(at_peak.values())
    return PeakReport(total=total, components=parts, phases={"forward": total}, probe="storage")


def measured() -> PeakReport:
    with StorageProbe() as probe:
        with component("dispatch"):
            kept = torch.zeros(3 << 18)
        with component("vocab"):
            torch.zeros(1 << 18).exp_()
        del kept
    return probe.report()


def test_merging_takes_each_maximum_but_one_moment():
    a, b = made(dispatch=100, vocab=50), made(dispatch=20, vocab=180)
    both = a.merge(b)
    assert both.total == 200 == sum(part.at_peak for part in both.components.values())
    assert {name: both.components[name].at_peak for name in ("dispatch", "vocab")} == {"dispatch": 20, "vocab": 180}
    assert {name: both.components[name].peak for name in ("dispatch", "vocab")} == {"dispatch": 110, "vocab": 190}
    assert both.components["dispatch"].working == 50 and both.components["dispatch"].phases == {"forward": 100}
    assert (both.steps, both.ranks, both.largest, a.largest) == (2, 1, "vocab", "dispatch")
    ranks = merge_ranks([both, a.merge(a)])
    assert (ranks.steps, ranks.ranks, ranks.total) == (2, 2, 200)
    with pytest.raises(ValueError, match="over='hosts' is unknown"):
        a.merge(b, over="hosts")


def test_a_row_holds_everything_at_a_length_that_does_not_depend_on_it():
    empty, full = made(), measured().merge(made(aux=7))
    for report in (empty, full):
        assert len(report.to_row()) == 3 + len(PHASES) + len(COMPONENTS) * (3 + len(PHASES))
        assert PeakReport.from_row(report.to_row(), report.probe) == report


def test_json_follows_its_schema_and_reads_back(tmp_path):
    reports = {"stock": measured(), "patched": made(vocab=3)}
    save_reports(tmp_path / "peaks.json", reports)
    values = json.loads((tmp_path / "peaks.json").read_text())
    jsonschema.Draft202012Validator.check_schema(PEAKS_SCHEMA)
    jsonschema.validate(values, PEAKS_SCHEMA)
    assert values["reports"]["stock"]["total"] == 4 << 20
    assert load_reports(tmp_path / "peaks.json") == reports
    del values["reports"]["stock"]["components"]["aux"]
    with pytest.raises(jsonschema.ValidationError, match="aux"):
        jsonschema.validate(values, PEAKS_SCHEMA)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a peaks file"),
        (
            '{"format": "hf-longmoe peaks", "version": 99}',
            "peaks file of version 99, this version of hf-longmoe reads 1",
        ),
    ],
)
def test_other_files_are_a_one_line_error_that_names_the_file(tmp_path, text, message):
    (tmp_path / "peaks.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        load_reports(tmp_path / "peaks.json")
    assert message in str(caught.value) and "peaks.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_table_of_one_report_in_plain_text():
    text = io.StringIO()
    print_reports({"this run": measured()}, caps={"dispatch": 6 << 20}, file=text)
    lines = text.getvalue().splitlines()
    assert lines[0] == "Peak bytes, this run (highest of 1 step)"
    cells = {row[0]: row for row in ([c.strip() for c in line.split("|")[1:-1]] for line in lines) if row}
    assert cells["component"] == ["component", "own peak", "at total peak", "working", "cap", "forward"]
    assert cells["dispatch"] == ["dispatch", "3 MiB", "3 MiB", "0 B", "6 MiB", "3 MiB"]
    assert cells["vocab"] == ["vocab", "1 MiB", "1 MiB", "1 MiB", "", "1 MiB"]
    assert cells["total"][:3] == ["total", "4 MiB", "4 MiB"]
    assert "aux" not in cells and text.getvalue().isascii() and "\x1b" not in text.getvalue()


def test_reports_side_by_side_say_what_the_last_saves():
    text = io.StringIO()
    print_reports({"stock": made(dispatch=1014, vocab=90), "patched": made(dispatch=246, vocab=90)}, file=text)
    cells = {
        row[0]: row
        for row in ([c.strip() for c in line.split("|")[1:-1]] for line in text.getvalue().splitlines())
        if row
    }
    assert cells["dispatch"] == ["dispatch", "1 KiB", "256 B", "75.0%"]
    assert cells["vocab"] == ["vocab", "100 B", "100 B", "0.0%"]
    assert cells["total"] == ["total", "1.08 KiB", "336 B", "69.6%"]


def test_plots_are_written_and_leave_pyplot_alone(tmp_path):
    plot_reports(tmp_path / "one.png", {"this run": measured()})
    plot_reports(tmp_path / "two.png", {"stock": measured(), "patched": made(dispatch=1 << 20)})
    for name in ("one.png", "two.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_a_plot_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"^Plots need matplotlib: pip install 'hf-longmoe\[plot\]'\.$"):
        plot_reports(tmp_path / "one.png", {"this run": measured()})
