"""The commands as users give them: what they print, as text and as JSON, and every line of an error."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch

from hf_longmoe.cli import COMMANDS, main
from hf_longmoe.commands import machine
from hf_longmoe.commands.doctor import findings
from hf_longmoe.integrations.transformers.traffic import LayerTraffic, as_json, summary
from hf_longmoe.peaks import ComponentPeak, PeakReport, load_reports, save_reports
from hf_longmoe.peaks.region import COMPONENTS
from hf_longmoe.peaks.schema import PEAKS_SCHEMA
from hf_longmoe.schedules.host import control_groups

GIB = 2**30


def report(probe="storage", **bytes_of) -> PeakReport:
    parts = {
        name: ComponentPeak(peak=n, at_peak=n, working=n // 2, phases={"forward": n})
        for name in COMPONENTS
        for n in [bytes_of.get(name, 0)]
    }
    total = sum(bytes_of.values())
    return PeakReport(total=total, components=parts, phases={"forward": total}, probe=probe, steps=3)


@pytest.fixture
def leave(tmp_path):
    """`leave("a", report(...))`: the folder of a run whose callback left this."""

    def leave(name, *reports, **labelled) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        save_reports(folder / "peaks.json", labelled or {"this run": reports[0]})
        return folder

    return leave


@pytest.fixture
def call(capsys):
    """`call("report", folder)`: the exit code, standard output and standard error."""

    def call(*words):
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as stop:  # argparse
            code = stop.code
        return code, *capsys.readouterr()

    return call


def cells(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


# -- report ----------------------------------------------------------------------------------------------------------
def test_a_run_as_a_table(leave, call):
    folder = leave("run", report(dispatch=3 * GIB, vocab=GIB))
    for place in (folder, folder / "peaks.json"):
        code, text, errors = call("report", place)
        assert (code, errors) == (0, "")
        assert text.startswith("Peak bytes, this run (highest of 3 steps)\n")
        assert cells(text)["dispatch"] == ["3 GiB", "3 GiB", "1.5 GiB", "3 GiB"] and cells(text)["total"][0] == "4 GiB"
        assert text.endswith("Most of the total peak: dispatch, 3 GiB of 4 GiB.\n")
        assert text.isascii() and "\x1b" not in text


def test_two_runs_side_by_side_and_what_the_second_saves(leave, call):
    first, second = leave("before", report(dispatch=4 * GIB)), leave("after", report(dispatch=GIB, vocab=GIB))
    code, text, errors = call("report", first, second)
    assert (code, errors) == (0, "")
    assert cells(text)["component"] == ["before", "after", "saved"]
    assert cells(text)["dispatch"] == ["4 GiB", "1 GiB", "75.0%"]
    assert cells(text)["vocab"] == ["0 B", "1 GiB", ""]
    assert cells(text)["total"] == ["4 GiB", "2 GiB", "50.0%"]


def test_runs_are_told_apart_by_their_paths(leave, call):
    first, second = leave("a/out", report(vocab=GIB)), leave("b/out", stock=report(vocab=8), ours=report(vocab=4))
    _, text, _ = call("report", first, second)
    assert cells(text)["component"] == ["a/out", "b/out: stock", "b/out: ours", "saved"]
    assert "Saved: b/out: ours against a/out." in text
    copy = first / "earlier.json"
    copy.write_text((first / "peaks.json").read_text())
    assert cells(call("report", copy, first)[1])["component"] == ["earlier.json", "out", "saved"]


def test_brackets_in_a_name_are_no_markup(leave, call):
    names = ["run [bold]", "run [-1]"]
    _, text, _ = call("report", *(leave(name, report(vocab=8)) for name in names))
    assert cells(text)["component"] == [*names, "saved"]


def test_different_probes_are_named(leave, call):
    first, second = leave("cpu", report(vocab=8)), leave("gpu", report(probe="allocator", vocab=8))
    assert (
        "Not measured alike: cpu by the storage probe, gpu by the allocator probe." in call("report", first, second)[1]
    )
    assert "Not measured alike" not in call("report", first)[1]


def test_json_is_a_peaks_file_of_all_reports(leave, call, tmp_path):
    first, second = leave("before", report(dispatch=4)), leave("after", report(dispatch=1))
    code, text, errors = call("report", first, "--json")
    assert (code, errors, text) == (0, "", (first / "peaks.json").read_text())
    code, text, errors = call("report", first, second, "--json", "--plot", tmp_path / "both.png")
    assert (code, errors) == (0, f"Plot: {tmp_path / 'both.png'}\n")
    jsonschema.validate(json.loads(text), PEAKS_SCHEMA)
    (tmp_path / "both.json").write_text(text)
    assert load_reports(tmp_path / "both.json") == {"before": report(dispatch=4), "after": report(dispatch=1)}


def test_a_plot(leave, call, tmp_path):
    code, text, errors = call("report", leave("run", report(vocab=8)), "--plot", tmp_path / "peaks.PNG")
    assert (code, errors) == (0, "") and text.endswith(f"Plot: {tmp_path / 'peaks.PNG'}\n")
    assert (tmp_path / "peaks.PNG").read_bytes().startswith(b"\x89PNG")


def test_experts_are_summed_up_in_the_words_of_the_callback(leave, call):
    numbers = dict(row_budget=64, largest_receive=60, largest_send=50, imbalance=2.5, imbalance_after=1.25, lent=1)
    quiet = LayerTraffic(waves=2, lent_bytes=0, **numbers)
    busy = LayerTraffic(waves=7, lent_bytes=3 * 2**20, **{**numbers, "largest_send": 40})
    steps = {3: {"layers.0": quiet, "layers.1": busy}, 13: {}}
    folder, other = leave("run", report(dispatch=8)), leave("other", report(dispatch=8))
    (folder / "experts.json").write_text(json.dumps({str(n): as_json(layers) for n, layers in steps.items()}))
    line = summary(steps.values())
    assert "at most 7 waves of 64 rows" in line and "3 MiB" in line
    assert call("report", folder)[1].splitlines()[-1] == line
    assert call("report", folder, other)[1].splitlines()[-1] == f"run: {line}"
    for text in ('{"3": {"layers.0": {}}}', "{", "[1]", '{"3": {"a": {"waves": "x"}, "b": {"waves": 1}}}'):
        (folder / "experts.json").write_text(text)
        code, shown, errors = call("report", folder)
        assert code == 0 and "Expert parallelism" not in shown and "Most of the total peak" in shown
        assert errors == f"{folder / 'experts.json'}: not as ComponentPeakCallback writes it; left out.\n"
    (folder / "experts.json").write_text("{}")
    assert call("report", folder)[2] == ""


def damaged(change) -> str:
    values = {"format": "hf-longmoe peaks", "version": 1, "unit": "bytes"}
    values["reports"] = {"this run": report(vocab=8).to_dict()}
    change(values)
    return json.dumps(values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"\x89PNG\xff", "not a text file; ComponentPeakCallback writes peaks.json."),
        (b'{"loss": 1}', "not a peaks file; ComponentPeakCallback writes one as peaks.json."),
        (damaged(lambda v: v.update(version=99)), "of version 99, this version of hf-longmoe reads 1."),
        (damaged(lambda v: v.pop("version")), "a damaged peaks file (KeyError: 'version')."),
        (damaged(lambda v: v["reports"]["this run"].pop("total")), "a damaged peaks file (TypeError"),
        (
            damaged(lambda v: v["reports"]["this run"]["components"].pop("aux")),
            "a damaged peaks file (KeyError: 'aux').",
        ),
        (damaged(lambda v: v["reports"]["this run"].update(total="8")), "not whole numbers of bytes"),
        (damaged(lambda v: v.update(reports=[])), "a damaged peaks file (AttributeError"),
        (damaged(lambda v: v.update(reports={})), "no report at all"),
    ],
)
def test_a_file_that_is_no_peaks_file(call, tmp_path, content, message):
    file = tmp_path / "peaks.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, text, errors = call("report", tmp_path)
    assert (code, text) == (2, "")
    assert errors.startswith(f"hf-longmoe report: {file}: ") and message in errors and errors.count("\n") == 1


def test_a_folder_without_peaks_or_none_at_all(leave, call, tmp_path):
    leave("runs/stock", report(vocab=8))
    code, text, errors = call("report", tmp_path / "runs")
    assert (code, text) == (2, "")
    assert errors == (
        f"hf-longmoe report: {tmp_path}/runs: no peaks.json in it; ComponentPeakCallback writes it when training ends."
        f" There is one in {tmp_path}/runs/stock.\n"
    )
    assert "There is one" not in call("report", tmp_path)[2]
    code, text, errors = call("report", tmp_path / "runs/stock", tmp_path / "none")
    assert (code, text, errors) == (2, "", f"hf-longmoe report: {tmp_path}/none: no such folder or file.\n")
    same = call("report", tmp_path / "runs/stock", tmp_path / "runs/../runs/stock/peaks.json")
    assert same[0] == 2 and same[2].endswith("both are the same run.\n")


def test_plots_that_cannot_be_written(leave, call, tmp_path, monkeypatch):
    folder = leave("run", report(vocab=8))
    (tmp_path / "taken.png").mkdir()
    for file, message in (
        ("peaks.svg", "a PNG is written; end the name in .png."),
        ("none/peaks.png", f"there is no folder {tmp_path}/none; make it first."),
        ("taken.png", "cannot be written (Is a directory)."),
    ):
        expected = f"hf-longmoe report: --plot {tmp_path / file}: {message}\n"
        assert call("report", folder, "--plot", tmp_path / file) == (2, "", expected)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, text, errors = call("report", folder, "--plot", tmp_path / "peaks.png")
    assert (code, text) == (2, "") and errors.endswith("Plots need matplotlib: pip install 'hf-longmoe[plot]'.\n")


# -- the command line ------------------------------------------------------------------------------------------------
def test_words_that_are_no_command_are_one_line(call):
    for words, message in (
        ([], "hf-longmoe: the following arguments are required: COMMAND"),
        (["doctr"], f"hf-longmoe: unknown command 'doctr'; known are {', '.join(COMMANDS)}. Did you mean 'doctor'?"),
        (["report"], "hf-longmoe report: the following arguments are required: RUN_DIR"),
        (["doctor", "--jsn"], "hf-longmoe: unrecognized arguments: --jsn"),
    ):
        code, text, errors = call(*words)
        assert (code, text) == (2, "") and errors.startswith(message) and errors.count("\n") == 1


def test_help_names_every_command_and_argument(call):
    code, text, _ = call("--help")
    assert code == 0 and all(name in text for name in COMMANDS)
    code, text, _ = call("report", "--help")
    assert code == 0 and all(word in text for word in ("RUN_DIR", "OTHER_DIR", "--json", "--plot FILE"))


def test_the_installed_command_and_the_module(leave):
    folder = leave("run", report(vocab=8))
    script = [Path(sys.executable).with_name("hf-longmoe"), "report", folder]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and cells(done.stdout)["vocab"][0] == "8 B"
    module = [sys.executable, "-m", "hf_longmoe", "report", folder / "none"]
    done = subprocess.run(module, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.endswith("no such folder or file.\n")


def test_no_host_library_is_imported():
    code = (
        "import sys\n"
        "from hf_longmoe.cli import main\n"
        "assert 'torch' not in sys.modules\n"
        "code = main(['doctor', '--json'])\n"
        "assert code in (0, 1), code\n"
        "assert not {'transformers', 'accelerate', 'peft', 'datasets', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)


# -- doctor ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def sound(monkeypatch):
    """Nothing in this machine's environment, limits or devices that would go wrong."""
    for name in list(os.environ):
        if name.startswith("LONGMOE_") or name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(control_groups, "control_group_limits", lambda: (None, None))
    monkeypatch.setattr(machine, "_driver", lambda: None)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: None)
    return monkeypatch


@pytest.fixture
def two_gpus(sound, tmp_path):
    """torch as it would be with two of them, the second on a known link."""
    link = tmp_path / "0000:3b:00.0"
    link.mkdir()
    (link / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    (link / "current_link_width").write_text("16\n")
    told = machine._host_link
    properties = [
        SimpleNamespace(is_integrated=0, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in (9, 59)
    ]
    sound.setattr(machine, "_host_link", lambda device: told(device, tmp_path))
    sound.setattr("torch.accelerator.current_accelerator", lambda check_available=False: torch.device("cuda"))
    sound.setattr("torch.accelerator.device_count", lambda: 2)
    sound.setattr("torch.accelerator.get_memory_info", lambda index: ((79, 20)[index] * GIB, 80 * GIB))
    sound.setattr("torch.cuda.get_device_properties", lambda device: properties[device.index])
    sound.setattr("torch.cuda.get_device_name", lambda index: "NVIDIA Test")
    sound.setattr("torch.cuda.can_device_access_peer", lambda i, j: True)
    return sound


def test_a_sound_machine(sound, call):
    code, text, errors = call("doctor")
    assert (code, errors) == (0, "") and text.isascii()
    for name in ("torch", "transformers", "accelerate", "peft", "datasets", "matplotlib"):
        assert any(line.split()[:2] == [name, metadata.version(name)] for line in text.splitlines()), name
    for name in ("memory", "control group", "ulimit -l", "cores", "OMP_NUM_THREADS"):
        assert f"\n  {name} " in text
    assert "Would go wrong\n  - nothing\n" in text and "No accelerator: boundaries stay where they are" in text
    code, text, errors = call("doctor", "--json")
    values = json.loads(text)
    assert (code, errors, values["format"], values["version"]) == (0, "", "hf-longmoe doctor", 1)
    assert values["problems"] == [] and len(values["notes"]) >= 1
    assert values["packages"]["hosts"]["torch"] == {"installed": torch.__version__, "needs": ">=2.11", "fits": True}
    assert 0 < values["host"]["available_bytes"] <= values["host"]["total_bytes"]
    assert values["threads"]["cores"] >= values["threads"]["update_threads"] >= 1


def test_packages_that_are_absent_or_too_old(sound, call):
    stock = metadata.version
    versions = {"transformers": "4.57.1", "peft": "0.18.0", "matplotlib": "3.1", "torch": "2.11.0a0+git1"}

    def version(name):
        if name in ("accelerate", "datasets"):
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or stock(name)

    sound.setattr(metadata, "version", version)
    code, text, _ = call("doctor")
    wrong = text.partition("Would go wrong\n")[2].partition("\n\n")[0].splitlines()
    assert code == 1 and wrong == [
        "  - transformers 4.57.1: transformers<6,>=5.24 is needed, the integrations refuse it."
        ' pip install "transformers<6,>=5.24"',
        '  - accelerate is not installed: the integrations do not load. pip install "accelerate>=1.15"',
        '  - peft 0.18.0: peft>=0.21 is needed, it may fail. pip install "peft>=0.21"',
        '  - matplotlib 3.1: matplotlib>=3.8 is needed, it may fail. pip install "matplotlib>=3.8"',
    ]
    assert "4.57.1            needs <6,>=5.24  WRONG VERSION\n" in text
    assert "\n  datasets            not installed     needs >=5\n" in text


def test_nothing_at_all_is_there(sound, call):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    for name in ("torch", "psutil", "hf_longmoe.schedules.host", "hf_longmoe.schedules.optimizer.update", "resource"):
        sound.setitem(sys.modules, name, None)
    sound.setattr(metadata, "version", missing)
    sound.setattr(metadata, "requires", missing)
    code, text, errors = call("doctor")
    assert (code, errors) == (1, "")
    assert "\n  - torch is not installed: the integrations do not load." in text
    assert "hf_longmoe has no metadata here" in text
    for line in (
        "  memory              not known",
        "  ulimit -l           not known",
        "  not known",
    ):
        assert f"\n{line}\n" in text
    facts = json.loads(call("doctor", "--json")[1])
    assert facts["host"]["total_bytes"] is None and facts["threads"]["torch_threads"] is None


def test_a_torch_that_is_installed_and_does_not_load(sound, call):
    sound.setitem(sys.modules, "torch", None)
    code, text, _ = call("doctor")
    assert code == 1 and "cannot be imported: import of torch halted" in text


def test_devices_their_memory_and_links(two_gpus, call):
    two_gpus.setattr(machine, "_lockable", lambda: "unlimited")
    code, text, errors = call("doctor")
    assert (code, errors) == (0, "")
    assert (
        "  cuda:0              NVIDIA Test, 79 GiB of 80 GiB free, memory of its own\n"
        "                      link to the host: not known\n"
        "  cuda:1              NVIDIA Test, 20 GiB of 80 GiB free, memory of its own\n"
        "                      link to the host: PCIe 32.0 GT/s x16\n"
        "  between devices     peer access: all; NVLink: not known\n"
    ) in text
    assert "cuda:1 has 20 GiB of 80 GiB free: others hold the rest." in text and "cuda:0 has" not in text
    two_gpus.setattr("torch.cuda.can_device_access_peer", lambda i, j: i == 0)
    assert "Peer access between devices: some." in call("doctor")[1]

    def busy(index):
        raise RuntimeError("CUDA error: device is busy")

    two_gpus.setattr("torch.accelerator.get_memory_info", busy)
    code, text, _ = call("doctor")
    assert code == 0 and "NVIDIA Test, not known, memory of its own" in text


def test_a_limit_on_locked_memory(two_gpus, call):
    two_gpus.setattr(machine, "_lockable", lambda: 64 << 10)
    code, text, _ = call("doctor")
    assert code == 1 and "  ulimit -l           64 KiB\n" in text
    assert "  - ulimit -l is 64 KiB: host memory cannot be pinned" in text.partition("Would go wrong")[2]
    two_gpus.setattr("torch.accelerator.current_accelerator", lambda check_available=False: None)
    code, text, _ = call("doctor")
    assert code == 0 and "ulimit -l is 64 KiB" in text.partition("Good to know")[2]


@pytest.mark.parametrize(("soft", "capabilities", "expected"), [(65536, 0, 65536), (65536, 1 << 14, "unlimited")])
def test_locked_memory_is_not_limited_for_who_may_lock(monkeypatch, soft, capabilities, expected):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
    read = Path.read_text
    status = f"Name:\tx\nCapEff:\t{capabilities:016x}\n"
    monkeypatch.setattr(Path, "read_text", lambda p, *a, **k: status if p.name == "status" else read(p, *a, **k))
    assert machine._lockable() == expected
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert machine._lockable() == "unlimited"


def test_a_gpu_that_torch_does_not_see(sound, call):
    sound.setattr(machine, "_driver", lambda: "NVIDIA")
    sound.setattr("torch.version.cuda", None)
    code, text, _ = call("doctor")
    assert code == 1 and "An NVIDIA GPU is there, and torch does not see it; this torch is a build for CPU." in text
    sound.setattr("torch.version.cuda", "13.0")
    assert "torch is built for CUDA: the driver may be too old, or CUDA_VISIBLE_DEVICES hides it." in call("doctor")[1]


def test_threads(sound, call):
    sound.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    sound.setenv("OMP_NUM_THREADS", "1")
    sound.setenv("LONGMOE_OPTIMIZER_UPDATE_ON", "cpu")
    code, text, _ = call("doctor")
    assert code == 0 and "\n  OMP_NUM_THREADS     1\n" in text
    assert "  - OMP_NUM_THREADS=1 with update_on=cpu: the optimizer raises it to 6 during its step" in text
    sound.setenv("LONGMOE_OPTIMIZER_UPDATE_ON", "accelerator")
    assert "the optimizer raises it" not in call("doctor")[1]
    for value, message in (
        ("7", "OMP_NUM_THREADS=7 on 6 cores: threads wait"),
        ("x", "OMP_NUM_THREADS=x is not a number"),
    ):
        sound.setenv("OMP_NUM_THREADS", value)
        code, text, _ = call("doctor")
        assert code == 1 and f"  - {message}" in text
    sound.setenv("OMP_NUM_THREADS", "6")
    sound.setattr(control_groups, "control_group_limits", lambda: (None, 2.5))
    code, text, _ = call("doctor")
    assert code == 1 and "\n  cores               6, time of 2.5\n" in text
    assert "2.5 cores' worth of time, and an update on the host starts 6 threads" in text


def test_variables(sound, call):
    sound.setenv("LONGMOE_VOCAB_BUDGET", "64MiB")
    code, text, _ = call("doctor")
    assert code == 0 and "\nEnvironment\n  LONGMOE_VOCAB_BUDGET=64MiB\n" in text
    sound.setenv("LONGMOE_DISPACH_BUDGET", "64MiB")
    sound.setenv("LONGMOE_ZZZ", "1")
    sound.setenv("LONGMOE_VOCAB_BUDGET", "lots")
    sound.setenv("LONGMOE_BOUNDARIES_HOST_BUDGET", "900TiB")
    code, text, _ = call("doctor", "--json")
    values = json.loads(text)
    assert code == 1 and values["environment"]["set"]["LONGMOE_ZZZ"] == "1"
    assert values["environment"]["unknown"] == {
        "LONGMOE_DISPACH_BUDGET": "LONGMOE_DISPATCH_BUDGET",
        "LONGMOE_ZZZ": None,
    }
    budget, misspelt, unknown, value = values["problems"]
    assert budget.startswith("LONGMOE_BOUNDARIES_HOST_BUDGET is 900 TiB a rank, and ")
    assert misspelt == "LONGMOE_DISPACH_BUDGET is read by nothing. Did you mean LONGMOE_DISPATCH_BUDGET?"
    assert unknown == "LONGMOE_ZZZ is read by nothing."
    assert value.startswith("The environment sets vocab.budget='lots' is not a size")


def test_a_control_group_that_allows_less_than_is_counted_as_free(sound, call):
    sound.setattr(control_groups, "control_group_limits", lambda: (1 << 20, None))
    code, text, _ = call("doctor")
    assert code == 1 and "\n  control group       at most 1 MiB\n" in text
    assert "  - The control group allows 1 MiB of host memory, and " in text


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (
            "0::/job/step\n",
            {"job/memory.max": "1000", "job/step/memory.max": "max", "memory.max": "5000"},
            (1000, None),
        ),
        ("0::/job\n", {"job/cpu.max": "250000 100000", "cpu.max": "max 100000"}, (None, 2.5)),
        (
            "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n",
            {
                "memory/job/memory.limit_in_bytes": "3000",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "cpu,cpuacct/job/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/cpu.cfs_quota_us": "400000",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            (3000, 4.0),
        ),
        ("4:memory:/elsewhere\n", {"memory/memory.limit_in_bytes": "7000"}, (7000, None)),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, (None, None)),
        (None, {"memory.max": "1"}, (None, None)),
    ],
)
def test_limits_of_control_groups(tmp_path, membership, files, expected):
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text + "\n")
    if membership is not None:
        (tmp_path / "groups").write_text(membership)
    assert control_groups.control_group_limits(tmp_path / "fs", tmp_path / "groups") == expected


def test_memory_shared_with_the_host_has_nothing_to_offload(sound):
    facts = {
        "packages": machine.packages(),
        "accelerators": machine.devices(),
        "host": machine.host(),
        "threads": machine.threads(),
        "environment": machine.environment(),
    }
    shared = {"name": None, "free_bytes": 8, "total_bytes": 8, "own_memory": False, "host_link": None}
    facts["accelerators"].update(kind="mps", devices=[shared])
    wrong, notes = findings(facts)
    assert wrong == [] and "mps uses the host's memory: there is nothing to offload to." in notes
