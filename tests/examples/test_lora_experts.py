"""examples/lora_experts.py: the losses of stock PEFT at a fraction of its peak; and experts divided over processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def start(*arguments, launcher=()):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, str(ROOT / "examples" / "lora_experts.py"), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    (apart,) = re.findall(r"^The adapter in stock PEFT: logits differ by (\S+)\.$", done.stdout, re.MULTILINE)
    assert float(apart) < 1e-5
    found = re.findall(r"^(stock PEFT|patched): losses (.*); peaks: dispatch (.*), vocab (.*)$", done.stdout, re.M)
    return {name: ([float(loss) for loss in losses.split()], *peaks) for name, losses, *peaks in found}, done.stdout


@pytest.mark.slow
def test_one_process(tmp_path):
    runs, said = start("--output_dir", tmp_path, "--steps", 2, "--seq_len", 512)
    (stock, *_), (patched, *_) = runs["stock PEFT"], runs["patched"]
    assert len(stock) == 2 and max(abs(a - b) for a, b in zip(stock, patched, strict=True)) < 1e-4
    assert "LoRA by expert on gate_up_proj (r=8), down_proj (r=8)" in said and "tokens at a time, LoRA (r=8)" in said


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_processes_divide_the_experts(tmp_path):
    config = str(ROOT / "accelerate_configs" / "cpu_2proc_ep.yaml")
    launcher = ("-m", "accelerate.commands.launch", "--config_file", config)
    runs, said = start("--expert_parallel", "--output_dir", tmp_path, "--steps", 2, launcher=launcher)
    assert len(runs["patched"][0]) == 2 and "PipelinedLLEP" in said
