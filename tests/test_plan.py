"""`hf-longmoe plan` as users give it: what it prints, as text, JSON and a picture; every line of an error."""

import functools
import json
import re

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import hf_longmoe
from hf_longmoe import LongMoEConfig
from hf_longmoe.cli import main
from hf_longmoe.integrations.transformers import counting, planning
from hf_longmoe.planner import Layout
from hf_longmoe.planner.plot import curves
from hf_longmoe.planner.verification import Row, Verification

SMALL = dict(
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=1,
    num_local_experts=2,
    vocab_size=512,
)
SET = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
TINY = ["mixtral", *SET, "--seq-len", "8k"]
CAPS = (
    "dispatch: {budget: 1MiB}\nvocab: {budget: 1MiB, schedule: tiles}\nboundaries: {host_budget: 8GiB}\noptimizer:\n"
)


@pytest.fixture(scope="module", autouse=True)
def counted_once():
    """One count of each model for all tests, of fewer lengths, waves and tiles than usual."""

    def once(function, config, layout, *args, **options):
        key = (function, config.to_json_string(), layout.ep_size, layout.checkpointing, repr((args, options)))
        if key not in known:
            known[key] = function(config, layout, *args, **options)
        return known[key]

    known = {}
    with pytest.MonkeyPatch.context() as patch:
        fewer = counting.Lengths(stock=(1024, 4096), kept=(1024, 4096), bent=())
        patch.setattr(planning, "lengths_for", lambda config, layout: fewer)
        patch.setattr(counting, "_ROWS", 512)
        for name in ("count", "SchedulesAlone"):
            patch.setattr(planning, name, functools.partial(once, getattr(planning, name)))
        yield


@pytest.fixture
def call(capsys):
    """`call("mixtral", "--seq-len", "4k")`: the exit code, standard output and standard error."""

    def call(*words):
        capsys.readouterr()
        try:
            code = main(["plan", *map(str, words)])
        except SystemExit as stop:  # argparse
            code = stop.code
        return code, *capsys.readouterr()

    return call


def cells(text):
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


def used(text):
    """The Python and the launch line."""
    lines = [line[2:] for line in text.partition("To use it:\n")[2].partition("\nAssumed\n")[0].splitlines()]
    return lines[:-1], lines[-1]


# -- what it prints --------------------------------------------------------------------------------------------------
def test_a_plan_without_a_device(call, monkeypatch):
    code, text, errors = call(*TINY)
    assert (code, errors) == (0, "") and text.isascii() and "\x1b" not in text
    rows = cells(text)
    assert rows["vocab"][0] == "48 MiB" and rows["total"][1] and rows["total"][3]  # 12 bytes a logit
    assert "Whatever the routing, the scheduled total stays within" in text and "fits in" not in text
    assert "\nAssumed\n  - " in text and "\nNot counted\n  - " in text

    python, launch = used(text)
    patched, installed = [], []
    monkeypatch.setattr(hf_longmoe, "patch_model", lambda model, config: patched.append((model, config)))
    monkeypatch.setattr(hf_longmoe, "LongMoEPlugin", lambda config: plugin(config, installed))
    trainer = type("Trainer", (), {"accelerator": "the accelerator"})
    exec("\n".join(python), {"model": "the model", "trainer": trainer})
    assert patched == [("the model", LongMoEConfig())] and installed == [(LongMoEConfig(), "the accelerator")]
    assert launch == "accelerate launch --num_processes 1 train.py"


def plugin(config, installed):
    return type("Plugin", (), {"install": lambda self, accelerator: installed.append((config, accelerator))})()


def test_a_device_that_needs_caps_and_the_lines_that_give_them(call):
    words = [*TINY, "--device-memory", "40MiB", "--world-size", "4"]
    code, text, errors = call(*words, "--json")
    assert (code, errors) == (0, "")
    plan = json.loads(text)
    assert plan["fits"] is True and plan["scheduled_at_most"] <= plan["limit"] == int(40 * 2**20 * 0.92)
    assert plan["unbounded"]["total"] > plan["limit"] and plan["dies_first"]["component"] == "vocab"
    assert plan["unbounded"]["components"]["vocab"] == pytest.approx(12 * 8192 * 512, rel=0.01)
    assert plan["longest_unbounded"] < 8192 <= plan["longest_scheduled"]
    assert sum(plan["unbounded"]["at_peak"].values()) == plan["unbounded"]["total"]
    config = LongMoEConfig.from_dict(plan["config"])

    code, text, errors = call(*words)
    assert (code, errors) == (0, "") and "Unbounded does not fit in 36.8 MiB. What dies first is vocab, at" in text
    assert re.search(r"The longest context that fits: \d+k tokens unbounded, \d+k tokens scheduled\.", text)
    python, launch = used(text)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SMALL))
    namespace = {"model": model}
    exec("\n".join(line for line in python if line.startswith(("from ", "config"))), namespace)
    assert namespace["config"] == config
    assert launch == "accelerate launch --multi_gpu --num_processes 4 train.py"


def test_a_device_that_needs_none(call):
    code, text, _ = call(*TINY, "--device-memory", "1GiB")
    assert code == 0 and "Unbounded fits in 942 MiB." in text and "No schedule is needed: no caps." in text
    assert "patch_model(" not in text


def test_caps_of_your_own(call, tmp_path):
    (tmp_path / "caps.yaml").write_text(CAPS)
    code, text, errors = call(*TINY, "--config", tmp_path / "caps.yaml", "--device-memory", "40MiB")
    assert (code, errors) == (0, "")
    namespace = {}
    exec("\n".join(line for line in used(text)[0] if line.startswith(("from ", "config"))), namespace)
    assert namespace["config"] == LongMoEConfig.from_yaml(tmp_path / "caps.yaml")
    code, text, _ = call(*TINY, "--config", tmp_path / "caps.yaml", "--device-memory", "4MiB")
    assert code == 1 and "The caps given do not fit; without caps of your own, some are chosen." in text


def test_a_folder_and_a_file(call, tmp_path):
    AutoConfig.for_model("mixtral", **SMALL).save_pretrained(tmp_path)
    plans = [json.loads(call(*model, "--seq-len", "8k", "--json")[1]) for model in ([tmp_path], ["mixtral", *SET])]
    assert plans[0] == plans[1]
    assert json.loads(call(tmp_path / "config.json", "--seq-len", "8192", "--json")[1]) == plans[0]


def test_the_picture_is_of_the_plans_curves(call, tmp_path, monkeypatch):
    found, stock = [], planning.plan
    monkeypatch.setattr(planning, "plan", lambda *args, **options: found.append(stock(*args, **options)) or found[0])
    code, text, errors = call(*TINY, "--device-memory", "40MiB", "--plot", tmp_path / "plan.png")
    assert (code, errors) == (0, "") and text.endswith(f"\nPlot: {tmp_path / 'plan.png'}\n")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    lengths, before, after = curves(found[0])
    assert 8192 in lengths
    for length, *sizes in zip(lengths, before, after, strict=True):
        assert tuple(at["total"] for at in sizes) == tuple(prediction.total for prediction in found[0].at(length))
    assert before[lengths.index(8192)]["total"] == found[0].unbounded.total


def test_a_verified_plan(call, tmp_path):
    (tmp_path / "caps.yaml").write_text(CAPS)
    code, text, errors = call(*TINY, "--config", tmp_path / "caps.yaml", "--verify")
    assert (code, errors) == (0, "")
    unbounded, scheduled = (part for part in text.split("One rank alone, ")[1:])
    for way, part in (("unbounded", unbounded), ("scheduled", scheduled)):
        assert part.startswith(f"{way}: measured by fake steps of 1 layers")
        assert {"vocab", "dispatch", "total"} <= set(cells(part))
        assert all(float(row[-1].rstrip("%")) <= 3 for name, row in cells(part).items() if name != "component")


def test_a_verification_that_is_off_is_a_failure(call, monkeypatch):
    def off(planner, caps):
        return Verification((1,), {"unbounded": [Row("vocab", 104, 100)]})

    monkeypatch.setattr(planning.Planner, "verify", off)
    code, text, _ = call(*TINY, "--verify", "--json")
    assert code == 1 and json.loads(text)["verified"]["rows"]["unbounded"][0]["difference"] == 0.04


def test_a_dense_model_is_planned_without_dispatch(call):
    dense = [word for name in SMALL if "experts" not in name for word in ("--set", f"{name}={SMALL[name]}")]
    code, text, errors = call("llama", *dense, "--seq-len", "8k", "--json")
    plan = json.loads(text)
    assert (code, errors) == (0, "") and plan["config"]["dispatch"] is None and plan["config"]["vocab"]
    assert plan["unbounded"]["components"]["dispatch"] == 0


# -- what does not fit -----------------------------------------------------------------------------------------------
def test_what_would_fit_does(call):
    words = [*TINY[:-2], "--seq-len", "64k", "--device-memory", "30MiB"]
    code, text, errors = call(*words)
    assert (code, text) == (1, "") and errors.count("\n") == 1
    assert re.match(
        r"hf-longmoe plan: does not fit.*\w+ \(the largest, \S+ MiB of \S+ MiB\) by \S+ MiB beyond", errors
    )
    ways = errors.partition("; fits with ")[2].rstrip(".\n").split(" or ")
    assert len(ways) == 2
    for way in ways:
        assert call(*words, *way.split())[0] == 0, way
    code, _, errors = call(*TINY, "--device-memory", "100KiB")
    (way,) = errors.partition("; fits with ")[2].rstrip(".\n").split(" or ")
    assert code == 1 and way.startswith("--device-memory ")
    assert call(*TINY, *way.split())[0] == 0


# -- what it refuses -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["mixtrl"],
            "'mixtrl' is no model type, folder or config.json; a Hub id is owner/name. Did you mean 'mixtral'?",
        ),
        (["{folder}"], "{folder}: there is no config.json."),
        (["{folder}/bad.json"], "{folder}/bad.json: its config cannot be read (It looks like"),
        (
            ["mixtral", "--set", "hiden_size=3"],
            "the config of 'mixtral' has no field 'hiden_size'. Did you mean 'hidd",
        ),
        (["mixtral", "--set", "hidden_size"], "--set hidden_size: write NAME=VALUE, e.g. --set num_hidden_layers=48"),
        (["mixtral", "--set", "hidden_size=["], "--set hidden_size=[: '[' is not YAML"),
        (["mixtral", "--set", "hidden_size=x"], "the config of 'mixtral' takes no hidden_size='x' (TypeError: Field"),
        (["mixtral", "--set", "num_hidden_layers=0"], "num_hidden_layers=0 must be a positive number."),
        (["clip"], "config of model type 'clip': there is no causal LM for it; give the config of one."),
        (["mixtral", "--seq-len", "12 parsecs"], "--seq-len='12 parsecs' is not a number of tokens; write 65536,"),
        (["mixtral", "--device-memory", "80GG"], "--device-memory='80GG' is not a size; write bytes as an integer or"),
        (
            ["mixtral", "--seq-len", "4", "--cp", "8", "--world-size", "8"],
            "seq_len=4 is shorter than cp_size=8: a rank would have no token. Give at least 8 tokens, or a cp_size of",
        ),
        (["mixtral", "--ep", "3"], "ep_size=3 does not divide world_size=1; one of [1] would."),
        (
            ["mixtral", "--ep", "16", "--world-size", "16"],
            "ep_size=16 does not divide the 8 experts of mixtral; one of [1, 2, 4, 8] would.",
        ),
        (["llama", "--ep", "2", "--world-size", "2"], "ep_size=2, but llama as configured has no experts; give ep_s"),
        (["mixtral", "--imbalance", "2"], "imbalance=2.0 must be from 1 (balanced) to ep_size=1"),
        (["mixtral", "--dtype", "bf16"], "dtype='bf16' is unknown; choose one of bfloat16, float16, float32. Did you"),
        (["mixtral", "--cp", "x"], "argument --cp: invalid int value: 'x' (`hf-longmoe plan --help` shows"),
        (["mixtral", "--plot", "{folder}/none/a.png"], "--plot {folder}/none/a.png: there is no folder {folder}/none"),
        (["mixtral", "--config", "{folder}/none.yaml"], "No such file or directory: '{folder}/none.yaml'"),
        (["mixtral", "--config", "{folder}/bad.yaml"], "{folder}/bad.yaml: Unknown key 'dispach' in config. Did you"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_counted(call, tmp_path, monkeypatch, words, message):
    def count(*args, **options):
        raise AssertionError("counted")

    monkeypatch.setattr(planning, "count", count)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.yaml").write_text("dispach: {}")
    words = [word.replace("{folder}", str(tmp_path)) for word in words]
    code, text, errors = call(*words, *([] if "--seq-len" in words else ["--seq-len", "4k"]))
    assert (code, text) == (2, "") and errors.startswith("hf-longmoe plan: ") and errors.count("\n") == 1
    assert message.replace("{folder}", str(tmp_path)) in errors


def test_a_sequence_length_is_required(call):
    code, _, errors = call("mixtral")
    assert code == 2 and "the following arguments are required: --seq-len" in errors and errors.count("\n") == 1


def test_a_computation_that_has_no_fake_step(call):
    code, _, errors = call(*TINY, "--dtype", "float32")
    assert code == 2 and "dtype='float32': a fake step runs in \"bfloat16\" only" in errors and errors.count("\n") == 1


def test_ranks_beside_the_defaults(call, monkeypatch):
    def plan(config, layout, *args, **options):
        found.append(layout)
        raise ValueError("enough")

    found = []
    monkeypatch.setattr(planning, "plan", plan)
    words = ["mixtral", "--seq-len", "1M", "--world-size", "16", "--ep", "8", "--cp", "4", "--fsdp", "2"]
    call(*words, "--micro-batch", "2", "--parameter-dtype", "float32", "--checkpointing", "off")
    call("mixtral", "--seq-len", "1M")
    sizes = dict(seq_len=2**20, world_size=16, ep_size=8, cp_size=4, fsdp_size=2, micro_batch=2)
    given = Layout(**sizes, parameter_dtype="float32", checkpointing="off", imbalance=1.3)
    assert found == [given, Layout(seq_len=2**20)]
