"""Component peaks in trackers, by their names in `report_to`: trackio for real; W&B and MLflow as far as Transformers'
own callbacks. (TensorBoard, for real: `test_callback.py`.)"""

import json
import os
import sqlite3
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK

from hf_longmoe import ComponentPeakCallback

RUN = """
import json, sys
sys.path.insert(0, sys.argv[1])
from test_trackers import train
run = train(sys.argv[2], report_to="trackio", project="peaks", run_name="run")
print("logged", json.dumps([log for log in run.state.log_history if "peak/total_MiB" in log]))
"""


def train(folder, callbacks=(), **arguments):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=256)
    config = AutoConfig.for_model("mixtral", num_key_value_heads=2, num_local_experts=4, **sizes)
    ids = torch.randint(0, 256, (8, 32)).tolist()
    given = dict(max_steps=2, logging_steps=1, save_strategy="no", disable_tqdm=True, use_cpu=True)
    run = Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=TrainingArguments(str(folder), **given | arguments),
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        callbacks=[ComponentPeakCallback(every=1, first=1), *callbacks],
    )
    run.train()
    return run


def test_trackio_has_the_peaks_in_its_database(tmp_path):
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", RUN, os.path.dirname(__file__), str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    logged = json.loads(done.stdout.rpartition("logged ")[2])
    with sqlite3.connect(tmp_path / "trackio" / "peaks.db") as database:
        rows = [json.loads(metrics) for (metrics,) in database.execute("select metrics from metrics order by step")]
    rows = [row for row in rows if "train/peak/total_MiB" in row]
    assert [row["train/global_step"] for row in rows] == [log["step"] for log in logged] == [1, 2]
    for row, log in zip(rows, logged, strict=True):
        peaks = {name: value for name, value in log.items() if name.startswith("peak/")}
        assert len(peaks) >= 6 and {f"train/{name}": value for name, value in peaks.items()}.items() <= row.items()


def wandb(written):
    return {"_wandb": SimpleNamespace(log=written.append, run=SimpleNamespace(summary={}))}


def mlflow(written):
    def log_metrics(metrics, step, **options):
        written.append({**metrics, "step": step})

    return {"_ml_flow": SimpleNamespace(log_metrics=log_metrics), "_async_log": False}


@pytest.mark.parametrize(
    ("name", "client", "prefix", "step"),
    [("wandb", wandb, "train/", "train/global_step"), ("mlflow", mlflow, "", "step")],
)
def test_what_the_other_trackers_are_given(tmp_path, name, client, prefix, step):
    """Transformers' callback for this name in `report_to`, on a stand-in for the tracker, which is not installed."""
    written = []
    cls = INTEGRATION_TO_CALLBACK[name]
    events = ("__init__", "__del__", "on_train_begin", "on_train_end")
    quiet = {event: lambda self, *args, **kwargs: None for event in events}
    tracker = type(cls.__name__, (cls,), quiet)()
    vars(tracker).update(client(written), _initialized=True)
    run = train(tmp_path, callbacks=[tracker], report_to="none")
    logged = [log for log in run.state.log_history if "peak/total_MiB" in log]
    got = [row for row in written if f"{prefix}peak/total_MiB" in row]
    assert [row[step] for row in got] == [1, 2]
    for row, log in zip(got, logged, strict=True):
        assert row[f"{prefix}peak/dispatch_MiB"] == log["peak/dispatch_MiB"] > 0
        assert row[f"{prefix}peak/vocab_MiB"] == log["peak/vocab_MiB"] > 0
