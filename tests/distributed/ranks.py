"""For the scripts that `launch` starts: ranks, their process group, meshes over any of them, cases in, results out."""

import datetime
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh


def main(run):
    """
    Calls `run(case)` on every rank for every case of the launch; each rank leaves {name: its result} in a file.

    The ranks are forks of this process, which has paid for the imports: they take most of a launch's time. When one
    fails, the others have a few seconds to end; when the time is up, each prints where it stands and ends.
    """
    folder, ranks, seconds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store, running = fork_ranks(ranks, lambda rank, port: os._exit(_rank(run, folder, rank, ranks, port, seconds)))
    until, failed = time.monotonic() + seconds + 5, []
    try:
        while running and time.monotonic() < until:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                time.sleep(0.02)
                continue
            rank = running.pop(pid)
            if status:
                failed.append(f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}")
                until = min(until, time.monotonic() + 10)
    finally:
        for pid, rank in running.items():
            failed.append(f"rank {rank} did not end")
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    del store
    sys.exit("; ".join(failed) or None)


def fork_ranks(ranks, body):
    """
    Forks that call `body(rank, port)`, which does not return, and the store at that port, to be kept until they end.

    The store is made when all are forked: a fork while its thread answers a rank may find locks held for ever.
    """
    to_read, to_write = os.pipe()
    running = {}
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            os.close(to_write)
            port = os.read(to_read, 8)
            if not port:
                os._exit(1)
            body(rank, int(port))
        running[pid] = rank
    os.close(to_read)
    store = distributed.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
    os.write(to_write, b"%8d" % store.port * ranks)
    os.close(to_write)
    return store, running


def _rank(run, folder, rank, ranks, port, seconds):
    name = None
    try:
        faulthandler.dump_traceback_later(seconds, exit=True)
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        torch.set_num_threads(1)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        store = distributed.TCPStore("127.0.0.1", port, ranks, is_master=False)
        timeout = datetime.timedelta(seconds=seconds)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        results = {}
        for name, case in json.loads((folder / "cases.json").read_text()).items():
            results[name] = run(case)
        (folder / f"rank{rank}.json").write_text(json.dumps(results))
        distributed.barrier()
        distributed.destroy_process_group()
        return 0
    except BaseException:
        (folder / f"rank{rank}.failed").write_text(f"{name!r} on rank {rank}: {traceback.format_exc()}")
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


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
