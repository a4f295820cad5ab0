"""For scripts that start runs which are meant to fail: forked ranks, a parent that is the launcher, how each ended."""

import datetime
import faulthandler
import os
import signal
import sys
import time
import traceback

import torch
from ranks import fork_ranks
from torch import distributed


def launch(work, ranks, folder, seconds=150, grace=45.0, at=None, to_the_end=False):
    """
    `work(rank)` on every rank, each a fork of this process, which has paid for the imports and holds the store.

    Arguments:
        at: called with the pids all the while; may kill some.
        to_the_end: a rank that fails ends by an exception that nobody catches and the interpreter's own end, as a
            script does, which takes seconds of processor time. No caller may catch the exception then.
        grace: seconds that the others have once one rank has ended badly. A real launcher would end them at once: here
            they have to end by themselves.

    Returns:
        By rank: `{"code": exit code, "after": seconds between the first end and this one, "said": its output}`.
    """
    os.makedirs(folder, exist_ok=True)
    store, running = fork_ranks(
        ranks, lambda rank, port: _rank(work, rank, ranks, port, f"{folder}/rank{rank}.log", seconds, to_the_end)
    )
    ended, first = {}, None
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
    del store
    for rank, how in ended.items():
        with open(f"{folder}/rank{rank}.log", errors="replace") as log:
            how["said"] = log.read()
    return [ended[rank] for rank in range(ranks)]


def _rank(work, rank, ranks, port, log, seconds, to_the_end):
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.dump_traceback_later(seconds, exit=True)
    torch.set_num_threads(1)
    if ranks > 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        store = distributed.TCPStore("127.0.0.1", port, ranks, is_master=False)
        timeout = datetime.timedelta(seconds=seconds)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    code = 0
    try:
        work(rank)
    except SystemExit as error:
        code = error.code
    except BaseException:
        if to_the_end:
            raise
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
