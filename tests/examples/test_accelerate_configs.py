"""Every launch file is one that Accelerate reads, and it starts as many connected processes as it says."""

import json
import re
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from hf_longmoe import LongMoEConfig

FOLDER = Path(__file__).parents[2] / "accelerate_configs"
FILES = sorted(FOLDER.glob("*.yaml"))

SHOW = """
import json, torch
from accelerate import PartialState
state = PartialState(cpu=True)
total = torch.ones(())
if state.num_processes > 1:
    torch.distributed.all_reduce(total)
found = {"processes": state.num_processes, "total": total.item(), "device": state.device.type}
with open(f"{state.process_index}.json", "w") as file:
    json.dump(found, file)
state.wait_for_everyone()
state.destroy_process_group()  # threads of gloo that are still connected may abort the process at its end
"""


def test_there_are_launch_files_and_the_readme_lists_them():
    assert len(FILES) >= 2
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{path.name}`" in readme for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_it(path):
    config = load_config_from_file(str(path))
    assert config.num_processes == int(re.search(r"_(\d+)proc", path.stem)[1])
    assert config.use_cpu == path.stem.startswith("cpu") and config.mixed_precision == "no"


def environment_of(path, *more):
    """What the launcher gives its processes, and its arguments, without starting any."""
    arguments = launch_command_parser().parse_args(["--config_file", str(path), *more, "script.py"])
    arguments = _validate_launch_command(arguments)[0]
    return prepare_multi_gpu_env(arguments), arguments


@pytest.mark.parametrize("path", [path for path in FILES if path.stem != "cpu_1proc"], ids=lambda path: path.stem)
def test_what_the_processes_are_told(path):
    environment, arguments = environment_of(path)
    shares = {"cpu_2proc_cp": 2, "cpu_4proc_cp": 2}.get(path.stem, 8 if "_cp_" in path.stem else 1)
    assert arguments.multi_gpu and not arguments.use_fsdp and not arguments.use_deepspeed
    assert "ACCELERATE_USE_FSDP" not in environment, "Accelerate would wrap a model that is divided already"
    assert (environment.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true") == (shares > 1)
    if shares > 1:
        sizes = {name: int(environment[f"PARALLELISM_CONFIG_{name}_SIZE"]) for name in ("DP_SHARD", "CP", "TP", "SP")}
        assert sizes == {"DP_SHARD": arguments.num_processes // shares, "CP": shares, "TP": 1, "SP": 1}
    else:
        assert not any(name.startswith("PARALLELISM_CONFIG") for name in environment)
    machines = {16: 2, 64: 8}.get(arguments.num_processes, 1)
    assert arguments.num_machines == machines
    assert int(arguments.nproc_per_node) * machines == arguments.num_processes


def test_a_launch_may_take_more_machines(monkeypatch):
    path = FOLDER / "fsdp2_ep_cp_64proc.yaml"
    more = ["--num_processes", "32", "--num_machines", "4", "--parallelism_config_dp_shard_size", "4"]
    # What was given is found in sys.argv.
    monkeypatch.setattr(sys, "argv", ["launch", *more, "--machine_rank", "3", "--main_process_ip", "node0"])
    environment, arguments = environment_of(path, *more, "--machine_rank", "3", "--main_process_ip", "node0")
    assert (arguments.nproc_per_node, arguments.nnodes, arguments.node_rank) == ("8", "4", 3)
    assert (arguments.main_process_ip, arguments.main_process_port) == ("node0", 29500)
    assert (environment["PARALLELISM_CONFIG_DP_SHARD_SIZE"], environment["PARALLELISM_CONFIG_CP_SIZE"]) == ("4", "8")


def test_an_unknown_key_is_refused(tmp_path):
    path = tmp_path / "misspelt.yaml"
    path.write_text((FOLDER / "fsdp2_ep_cp_8proc.yaml").read_text() + "paralellism: 8\n")
    with pytest.raises(ValueError, match="unknown keys.*paralellism"):
        load_config_from_file(str(path))


# test_quickstart.py starts cpu_2proc.yaml, and test_long_context_sft.py cpu_2proc_cp.yaml.
STARTED = [path for path in FILES if path.stem in ("cpu_1proc", "cpu_2proc_ep", "cpu_4proc_cp")]


@pytest.mark.parametrize("path", STARTED, ids=lambda path: path.stem)
def test_the_processes_find_each_other(python, path, tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    command = ["-m", "accelerate.commands.launch", "--config_file", path, tmp_path / "show.py"]
    done = python(*command, timeout=120, cwd=tmp_path)
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
