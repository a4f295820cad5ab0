"""examples/accelerate_loop.py: one process and two, and a run that goes on from a checkpoint."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIZES = ["--seq_len", "32", "--steps", "3"]


@pytest.fixture
def start(python):
    def start(*arguments, launcher=()):
        done = python(*launcher, ROOT / "examples" / "accelerate_loop.py", *SIZES, *arguments, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\d+\.\d+)$", done.stdout, re.MULTILINE)]
        assert re.search(r"^optimizer: 0 elements .* 1100352 on the host", done.stdout, re.MULTILINE)
        assert len(losses) == 3
        return losses

    return start


@pytest.mark.slow
def test_one_process_saves_and_resumes(start, tmp_path):
    first = start("--save_dir", tmp_path)
    assert max(first) < 8.5 and start() == first, "not the same twice"
    assert start("--resume_from", tmp_path) != first


@pytest.mark.slow
def test_two_processes(start):
    config = str(ROOT / "accelerate_configs" / "cpu_2proc.yaml")
    start(launcher=("-m", "accelerate.commands.launch", "--config_file", config))
