"""examples/long_context_sft.py on two processes that share sequence, model and experts; and what it refuses."""

import importlib
import json
import re
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
SEQ_LEN, STEPS = 256, 3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of some 60 to 90 tokens, so that a sequence holds several."""
    folder = tmp_path_factory.mktemp("data")
    lines = [f"def function_{i}(argument):\n    return argument + {i}\n" * 4 for i in range(60)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return folder


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    names = ("long_context_sft", "packing", "quickstart", "text")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("long_context_sft")
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def start(python, data, tmp_path):
    return lambda *more, **options: run(python, tmp_path, data, *more, **options)


def run(python, folder, data, *more, launch_file="cpu_2proc_cp"):
    values = {"output_dir": folder, "dataset": data, "seq_len": SEQ_LEN, "steps": STEPS}
    command = ["-m", "accelerate.commands.launch"]
    command += ["--config_file", ROOT / "accelerate_configs" / f"{launch_file}.yaml"]
    command += [ROOT / "examples" / "long_context_sft.py"]
    command += [part for name, value in values.items() for part in (f"--{name}", value)]
    done = python(*command, *more, timeout=280, cwd=folder)  # another folder: it must find its helpers by itself
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_dry_run_has_the_losses_of_one_process_and_leaves_a_whole_model(start, tmp_path, data, example):
    caps = ("--dispatch_budget", "1MiB", "--vocab_budget", "2MiB")
    code, out, err = start("--dtype", "float32", "--save_steps", "2", *caps)
    assert code == 0, err[-3000:]
    losses = [float(loss) for loss in re.findall(r"'loss': '?(\d+\.\d+)", out)]
    assert len(losses) == STEPS and losses[-1] < losses[0]

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    stream = example.pack(example.read_documents(str(data)), tokenizer, SEQ_LEN)
    blocks = list(islice(stream, STEPS))
    assert all(block["position_ids"].count(0) > 1 for block in blocks), "no sequence of several documents"
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).train()
    # The first step is the first of these, before any update.
    with torch.no_grad():
        wanted = [
            stock(**{name: torch.tensor(values)[None] for name, values in block.items()}, use_cache=False).loss.item()
            for block in blocks
        ]
    assert abs(losses[0] - wanted[0]) < 2e-3  # printed with three digits
    assert max(wanted) - min(wanted) > 1e-2, "losses that do not tell the sequences apart"

    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    place = state["stateful_callbacks"]["StreamPosition"]["attributes"]["place"]
    assert state["global_step"] == 2 and place["blocks"] == 2
    stream.load_state_dict(place)
    assert next(iter(stream)) == blocks[2]
    assert not (tmp_path / "checkpoint-1").exists()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    assert trained.num_parameters() == stock.num_parameters()
    with torch.no_grad():
        after = [
            trained(**{name: torch.tensor(values)[None] for name, values in block.items()}, use_cache=False).loss
            for block in blocks
        ]
    assert sum(after) < sum(wanted), "what was saved is not what was trained"
    reports = json.loads((tmp_path / "peaks.json").read_text())["reports"]
    assert reports["this run"]["ranks"] == 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_caps_by_the_plan_keep_the_device_memory(start, tmp_path):
    limit = 14
    code, out, err = start("--device_memory", f"{limit}MiB", "--steps", "1")
    assert code == 0, err[-3000:]
    assert "Predicted, and measured" in out
    total = json.loads((tmp_path / "peaks.json").read_text())["reports"]["this run"]["total"]
    assert total < limit * 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "launch_file", "said"),
    [
        ((), "cpu_1proc", r"error: Only one process; launch with .*cpu_2proc_cp\.yaml"),
        pytest.param(
            *(("--text_column", "body"), "cpu_2proc_cp", r"error: .*a\.jsonl: .*text_column='body'"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_refused_in_one_line_before_there_is_a_model(start, more, launch_file, said):
    code, out, err = start(*more, launch_file=launch_file)
    assert code and len(re.findall(said, err)) == 1, err[-3000:]
    assert "it/s" not in out
