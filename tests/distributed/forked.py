"""For scripts that start runs which are meant to fail: forked ranks, a parent that is the launcher, how each ended."""

import contextlib
import datetime
import faulthandler
import os
import signal
import sys
import time
import traceback

import torch
from torch import distributed


def launch(work, ranks, folder, seconds=60, grace=12.0, at=None):
    """
    `work(rank)` on every rank, each a fork of this process, which has paid for the imports and holds the store.

    Arguments:
        at: called with the pids all the while; may kill some.
        grace: seconds that the others have once one rank has ended badly. A real launcher would end them at once: here
            they have to end by themselves.

    Returns:
        By rank: `{"code": exit code, "after": seconds between the first end and this one, "said": its output}`.
    """
    os.makedirs(folder, exist_ok=True)
    store = distributed.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
    running, ended, first = {}, {}, None
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            _rank(work, rank, ranks, store.port, f"{folder}/rank{rank}.log", seconds)
        running[pid] = rank
    until = time.monotonic() + seconds
    while running and time.monotonic() < until:
        if at is not None:
            at([pid for pid, _ in sorted(running.items(), key=lambda item: item[1])])
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.01)
            continue
        now = time.monotonic()
        first = now if first is None else first
        code = os.waitstatus_to_exitcode(status)
        ended[running.pop(pid)] = {"code": code, "after": now - first}
        if code:
            until = min(until, first + grace)
    for pid, rank in running.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ended[rank] = {"code": "hung", "after": None}
    for rank, how in ended.items():
        with open(f"{folder}/rank{rank}.log", errors="replace") as log:
            how["said"] = log.read()
    return [ended[rank] for rank in range(ranks)]


def _rank(work, rank, ranks, port, log, seconds):
    """Ends as the interpreter would: by `os._exit` after what `atexit` and finalizers do is not what users run."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    code = 1
    try:
        faulthandler.dump_traceback_later(seconds, exit=True)
        torch.set_num_threads(1)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        os.environ.update(ACCELERATE_USE_CPU="true")
        if ranks > 1:
            store = distributed.TCPStore("127.0.0.1", port, ranks, is_master=False)
            timeout = datetime.timedelta(seconds=seconds)
            distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        else:
            for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                os.environ.pop(name)
        work(rank)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
