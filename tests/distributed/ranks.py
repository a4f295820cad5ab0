"""For the scripts that torchrun starts: the process group, meshes over any of its ranks, cases in and results out."""

import datetime
import faulthandler
import json
import sys
import traceback
import warnings
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh


def main(run):
    """Calls `run(case)` for every case of the launch, and leaves {name: its result} in a file of this rank's."""
    folder, seconds = Path(sys.argv[1]), int(sys.argv[2])
    faulthandler.dump_traceback_later(seconds, exit=True)
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
    rank = distributed.get_rank()
    cases = json.loads((folder / "cases.json").read_text())
    results = {}
    for name, case in cases.items():
        try:
            results[name] = run(case)
        except BaseException:
            (folder / f"rank{rank}.failed").write_text(f"{name!r} on rank {rank}: {traceback.format_exc()}")
            raise
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()


def mesh_of(groups, name):
    """
    A mesh over the group that this rank is in, of new process groups.

    Arguments:
        groups: lists of ranks, every rank in one of them.
        name: of the mesh's dimension.
    """
    mine = None
    for ranks in groups:
        group = distributed.new_group(ranks)
        if distributed.get_rank() in ranks:
            mine = group
    return DeviceMesh.from_group(mine, "cpu", mesh_dim_names=(name,))
