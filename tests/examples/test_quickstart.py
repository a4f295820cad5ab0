"""examples/quickstart.py: both ways of starting it, what it leaves, what it refuses, and that its check can fail."""

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from hf_longmoe.peaks import load_reports
from hf_longmoe.peaks.schema import PEAKS_SCHEMA

ROOT = Path(__file__).parents[2]
TEXT = "def function(argument):\n    return argument + 1\n"
# Sizes at which both peaks are well above their budgets, and small enough for a few seconds a run.
SEQ_LEN, STEPS = 256, 3
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 4}
BUDGET = 128 << 10


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.py").write_text("".join(TEXT.replace("1", str(i)) for i in range(1000)))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, data):
    """A Mixtral with its tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("tiny")
    spec = importlib.util.spec_from_file_location("text", ROOT / "examples" / "text.py")
    text = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(text)
    text.train_tokenizer(text.read_documents(str(data)), vocab_size=300).save_pretrained(folder)
    set_seed(0)
    config = AutoConfig.for_model(
        "mixtral", vocab_size=2048, num_attention_heads=2, num_key_value_heads=1, output_router_logits=True, **SIZES
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def arguments(tiny, data, tmp_path):
    values = {"model_name_or_path": tiny, "dataset": data, "seq_len": SEQ_LEN, "steps": STEPS}
    return {**values, "dispatch_budget": BUDGET, "vocab_budget": str(BUDGET), "output_dir": tmp_path / "run"}


def flags(arguments):
    return [str(part) for name, value in arguments.items() for part in (f"--{name}", value)]


@pytest.fixture
def start(python):
    def start(launcher, arguments):
        # From another folder: the example must find its helpers by itself.
        folder = arguments["output_dir"].parent
        return python(*launcher, ROOT / "examples" / "quickstart.py", *flags(arguments), timeout=240, cwd=folder)

    return start


def call(module, monkeypatch, arguments):
    """The example inside this process: its exit code."""
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *flags(arguments)])
    with pytest.raises(SystemExit) as caught:
        module.main()
    return caught.value.code


@pytest.fixture
def quickstart(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    names = ("quickstart", "packing", "text")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("quickstart")
    for name in names:
        sys.modules.pop(name, None)


ONE = ()
TWO = ("-m", "accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs" / "cpu_2proc.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        pytest.param(ONE, 1, id="python"),
        pytest.param(TWO, 2, id="accelerate launch", marks=pytest.mark.exhaustive),  # in a hurry, expert parallel only
    ],
)
def test_same_losses_and_lower_peaks(start, launcher, ranks, arguments):
    done = start(launcher, arguments)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ *(\d+) +(\d+\.\d{6}) +(\d+\.\d{6}) +(\d\.\de[-+]\d+)$", done.stdout, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [*range(1, STEPS + 1)]
    assert all(abs(float(stock) - float(patched)) < 1e-4 for _, stock, patched, _ in rows)
    assert float(rows[-1][1]) < float(rows[0][1]) - 0.01, "it does not learn"
    assert done.stdout.count("Losses equal to rounding") == 1

    folder = arguments["output_dir"]
    jsonschema.validate(json.loads((folder / "peaks.json").read_text()), PEAKS_SCHEMA)
    assert (folder / "peaks.png").read_bytes().startswith(b"\x89PNG")
    reports = load_reports(folder / "peaks.json")
    assert list(reports) == ["stock", "patched"] and all(report.ranks == ranks for report in reports.values())
    stock, patched = reports["stock"].components, reports["patched"].components
    # Logits, their log-softmax and its gradient, each [SEQ_LEN, 2048] in fp32, are what the stock step holds at once.
    assert stock["vocab"].peak >= 3 * SEQ_LEN * 2048 * 4
    assert patched["vocab"].peak < stock["vocab"].peak / 4 and patched["dispatch"].peak < stock["dispatch"].peak / 2
    assert patched["vocab"].working <= BUDGET and patched["dispatch"].working <= BUDGET
    assert reports["patched"].total < reports["stock"].total


@pytest.mark.slow
def test_expert_parallel_has_the_losses_of_one_process_and_bounded_waves(start, arguments, quickstart):
    config_file = str(ROOT / "accelerate_configs" / "cpu_2proc_ep.yaml")
    launcher = ("-m", "accelerate.commands.launch", "--config_file", config_file)
    done = start(launcher, {**arguments, "expert_parallel": True})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Losses equal to rounding") == 1
    reports = load_reports(arguments["output_dir"] / "peaks.json")
    assert all(report.ranks == 2 for report in reports.values())
    assert reports["patched"].components["dispatch"].working <= BUDGET + 24 * 2 * SEQ_LEN
    assert reports["stock"].components["dispatch"].peak > reports["patched"].components["dispatch"].peak
    by_step = json.loads((arguments["output_dir"] / "patched" / "experts.json").read_text())
    (layers,) = by_step.values()
    assert len(layers) == SIZES["num_hidden_layers"]
    for layer in layers.values():
        assert layer["waves"] > 1 and 0 < layer["largest_receive"] <= layer["row_budget"]
        assert 0 < layer["largest_send"] <= layer["row_budget"]
        assert layer["imbalance"] >= layer["imbalance_after"] >= 1
    assert not (arguments["output_dir"] / "stock" / "experts.json").exists()
    assert "Expert parallelism: at most" in done.stdout and "'experts/waves'" in done.stdout
    # One process, stock, the two processes' sequences one after the other.
    one = quickstart.QuickstartArguments(**{name: str(value) for name, value in arguments.items()})
    one.seq_len, one.steps = SEQ_LEN, STEPS
    training = dataclasses.replace(quickstart.training_arguments(one), gradient_accumulation_steps=2)
    tokenizer = quickstart.AutoTokenizer.from_pretrained(one.model_name_or_path)
    texts = quickstart.read_documents(one.dataset, None, None)
    losses, _ = quickstart.train(
        quickstart.build_model(one), training, quickstart.pack(texts, tokenizer, SEQ_LEN), "one"
    )
    rows = re.findall(r"^ *\d+ +\d+\.\d{6} +(\d+\.\d{6}) ", done.stdout, re.MULTILINE)
    assert len(losses) == len(rows) == STEPS
    for step, (loss, row) in enumerate(zip(losses, rows, strict=True), start=1):
        assert abs(loss - float(row)) <= step * 3e-5
    assert "LM head: vocab, ring (" in done.stdout


def test_offload_has_the_same_losses(quickstart, arguments, monkeypatch, capsys):
    assert call(quickstart, monkeypatch, {**arguments, "offload": True}) == 0
    out = capsys.readouterr().out
    assert "Losses equal to rounding" in out
    assert "boundaries: left where they are" in out and re.search(
        r"optimizer: 0 elements .* [1-9]\d* on the host", out
    )


def test_expert_parallel_needs_several_processes(quickstart, arguments, monkeypatch, capsys):
    assert call(quickstart, monkeypatch, {**arguments, "expert_parallel": True}) == 2
    assert "cpu_2proc_ep.yaml" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_processes_refuse_with_one_line_and_no_traceback_of_their_own(start, arguments):
    done = start(TWO, {**arguments, "vocab_budget": "1KiB"})
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "vocab.budget" in lines[0]
    assert "[rank" not in done.stderr  # torchrun puts it before each line of a worker's traceback
    assert not arguments["output_dir"].exists() or not list(arguments["output_dir"].rglob("peaks.json"))


def test_default_model_is_a_mixtral_of_30_million_parameters(quickstart):
    config = quickstart.model_config(quickstart.QuickstartArguments())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert config.model_type == "mixtral" and config.vocab_size == 32_000 and config._attn_implementation == "sdpa"
    assert 25e6 < model.num_parameters() < 35e6


@pytest.fixture
def bad(tmp_path, tiny, data):
    """Arguments that cannot work, by the words that the error must hold."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text("not json")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "no_such_model"}')
    (tmp_path / "small").mkdir()
    for file in tiny.iterdir():
        (tmp_path / "small" / file.name).write_bytes(file.read_bytes())
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "small" / "config.json").write_text(json.dumps({**config, "vocab_size": 299}))
    return {
        "steps": ({"steps": 0}, "steps=0 must be at least 1"),
        "size": ({"dispatch_budget": "lots"}, "dispatch.budget='lots' is not a size"),
        "dispatch": ({"dispatch_budget": "64"}, "dispatch.budget"),
        "vocab": ({"vocab_budget": "64"}, "vocab.budget"),
        "no text": ({"dataset": tmp_path / "empty"}, "holds no text; looked for"),
        "no folder": ({"dataset": tmp_path / "nowhere"}, "there is no such folder"),
        "bad lines": ({"dataset": tmp_path / "bad.jsonl"}, "bad.jsonl: no lines of"),
        "unknown model": ({"model_name_or_path": tmp_path / "unknown"}, "no_such_model"),
        "no model": ({"model_name_or_path": tmp_path / "empty"}, "config.json"),
        "vocabulary": ({"model_name_or_path": tmp_path / "small"}, "300 tokens but the model's vocabulary holds 299"),
    }


@pytest.mark.parametrize(
    "case",
    "steps,size,dispatch,vocab,no text,no folder,bad lines,unknown model,no model,vocabulary".split(","),
)
def test_bad_input_is_one_line_and_exit_code_2_before_any_training(
    case, bad, quickstart, arguments, monkeypatch, capsys
):
    monkeypatch.setattr(quickstart, "train", lambda *args: pytest.fail("it trained"))
    changed, words = bad[case]
    assert call(quickstart, monkeypatch, {**arguments, **changed}) == 2
    lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if line.startswith("error: ")]
    assert len(lines) == 1 and words in lines[0], lines


def test_losses_that_differ_give_exit_code_1(quickstart, arguments, monkeypatch, capsys):
    patch_model = quickstart.patch_model

    def wrong(model, config):
        with torch.no_grad():
            model.lm_head.weight.mul_(1.01)
        return patch_model(model, config)

    monkeypatch.setattr(quickstart, "patch_model", wrong)
    assert call(quickstart, monkeypatch, {**arguments, "steps": 1}) == 1
    assert "Losses NOT EQUAL" in capsys.readouterr().out
