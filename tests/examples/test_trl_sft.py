"""examples/trl_sft.py: completions and packed rows, with adapters, and in two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL asks for Python 3.11")
ROOT = Path(__file__).parents[2]


def start(folder, *arguments, launcher=()):
    text = "".join(f"def name_{i}(argument):\n    value = argument + {i}\n    return value\n\n\n" for i in range(40))
    (folder / "functions.py").write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sizes = ["--dataset", str(folder), "--output_dir", str(folder / "run"), "--seq_len", "64", "--steps", "2"]
    command = [sys.executable, *launcher, str(ROOT / "examples" / "trl_sft.py"), *sizes, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    number = r"(\d+\.\d+)"
    logs = re.findall(rf"^step \d+: loss {number} entropy {number} mean_token_accuracy {number}$", done.stdout, re.M)
    assert len(logs) == 2 and float(logs[1][0]) < float(logs[0][0]) < 9.5
    assert re.search(r"^lm_head: vocab, tiles", done.stdout, re.M) and "Nearest its cap" in done.stdout
    assert (folder / "run" / "peaks.json").exists()


def test_one_process(tmp_path):
    start(tmp_path, "--packing")


@pytest.mark.exhaustive
def test_two_processes_with_adapters(tmp_path):
    config = str(ROOT / "accelerate_configs" / "cpu_2proc.yaml")
    start(tmp_path, "--lora", launcher=("-m", "accelerate.commands.launch", "--config_file", config))
