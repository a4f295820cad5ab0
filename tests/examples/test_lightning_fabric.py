"""examples/lightning_fabric.py, as a user starts it."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_trains():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "examples" / "lightning_fabric.py"), "--seq_len", "32", "--steps", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\d+\.\d+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 2 and all(6.5 < loss < 8.5 for loss in losses)
    assert re.search(r"^lm_head: vocab, tiles", done.stdout, re.M)
    assert len(re.findall(r": dispatch, expert-major waves", done.stdout)) == 4
