"""Every launch file is one that Accelerate reads, and it starts as many connected processes as it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from hf_longmoe import LongMoEConfig

FOLDER = Path(__file__).parents[2] / "accelerate_configs"
FILES = sorted(FOLDER.glob("*.yaml"))

SHOW = """
import json, os, torch
from accelerate import PartialState
state = PartialState(cpu=True)
total = torch.ones(())
if state.num_processes > 1:
    torch.distributed.all_reduce(total)
found = {"processes": state.num_processes, "total": total.item(), "device": state.device.type}
with open(os.path.join(os.environ["OUT"], f"{state.process_index}.json"), "w") as file:
    json.dump(found, file)
"""


def test_there_are_launch_files_and_the_readme_lists_them():
    assert len(FILES) >= 2
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{path.name}`" in readme for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_it(path):
    config = load_config_from_file(str(path))
    assert config.num_processes == int(re.search(r"_(\d+)proc", path.stem)[1])
    assert config.use_cpu and config.mixed_precision == "no"


# test_quickstart.py starts cpu_2proc.yaml, and counts the ranks that report.
@pytest.mark.parametrize("path", [path for path in FILES if path.stem != "cpu_2proc"], ids=lambda path: path.stem)
def test_the_processes_find_each_other(path, tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", path, tmp_path / "show.py"]
    environment = {**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    size = load_config_from_file(str(path)).num_processes
    assert found == [{"processes": size, "total": size, "device": "cpu"}] * size


def test_the_readme_lists_every_variable_with_its_default(monkeypatch):
    text = (FOLDER / "README.md").read_text()
    config = LongMoEConfig()
    told = dict(re.findall(r"`(LONGMOE_[A-Z_]+)` \| `([^`]+)`", text))
    parts = config.to_dict().items()
    assert set(told) == {f"LONGMOE_{part}_{field}".upper() for part, fields in parts for field in fields}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert LongMoEConfig() == config
