"""One side of a case: a process of its own, or a group of them, that has built the case's problem."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks.case import Case, Sizes

__all__ = ["processes", "rank"]

_TIME_OUT = 900  # seconds that one step, or the building of a problem, may take; a hang ends in an error


def rank() -> int:
    """Of this process in its side; 0 where a side is one process."""
    return distributed.get_rank() if distributed.is_initialized() else 0


@dataclass(frozen=True)
class _Member:
    process: multiprocessing.process.BaseProcess
    connection: Connection


@contextlib.contextmanager
def processes(case: Case, role: str, threads: int, seconds: float = _TIME_OUT) -> Iterator[Callable[..., list]]:
    """
    A function that runs `function(problem, *arguments)` in each of `case.ranks` new processes, and returns what each
    has returned, by rank. Several processes are a gloo group.

    Raises:
        `RuntimeError`: from that function: a process failed, died, or did not answer within `seconds`.
    """
    # Fork: a second import of torch and transformers would take longer than a small case. No operator has run here.
    context = multiprocessing.get_context("fork")
    members: list[_Member] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(case.ranks):
            here, there = context.Pipe()
            # Forked along; while they are open in a child, the parent's end of a pipe never closes.
            parents = [*(member.connection for member in members), here]
            group = None if case.ranks == 1 else (str(Path(folder) / "store"), number, case.ranks, seconds)
            process = context.Process(target=_serve, args=(there, parents, case.sizes, threads, group), daemon=True)
            process.start()
            there.close()
            members.append(_Member(process, here))
        done = False

        def call(function: Callable, *arguments: Any) -> list:
            nonlocal done
            done = False  # until all have answered: then none of them waits for another
            results = _ask(members, f"{case.name}: {role}", seconds, function, arguments)
            done = True
            return results

        try:
            yield call
        finally:
            for member in members:
                member.connection.close()
            for member in members:
                member.process.join(timeout=10 if done else 0)
                member.process.kill()


def _ask(members: list[_Member], who: str, seconds: float, function: Callable, arguments: tuple) -> list:
    waiting = {member.connection: number for number, member in enumerate(members)}
    results: list = [None] * len(members)
    for member in members:
        with contextlib.suppress(BrokenPipeError):  # it has died: what follows says so
            member.connection.send((function, arguments))
    until = time.monotonic() + seconds
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
        if not ready:
            raise RuntimeError(f"{who}: no answer from rank {sorted(waiting.values())} within {seconds:g} seconds.")
        for connection in ready:
            number = waiting.pop(connection)
            try:
                succeeded, results[number] = connection.recv()
            except (EOFError, ConnectionResetError):
                process = members[number].process
                process.join()
                raise RuntimeError(
                    f"{who}: the process of rank {number} died with exit code {process.exitcode} "
                    "(-9 is the system's answer to too little memory)."
                ) from None
            if not succeeded:
                raise RuntimeError(f"{who}: rank {number} failed.\n{results[number]}")
    return results


def _serve(connection: Connection, parents: list[Connection], sizes: Sizes, threads: int, group: tuple | None) -> None:
    for parent in parents:
        parent.close()
    torch.set_num_threads(threads)
    problem = None
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            if problem is None:
                _join(group)
                problem = sizes.build()
            answer = True, function(problem, *arguments)
        except Exception:
            answer = False, traceback.format_exc()
        connection.send(answer)


def _join(group: tuple | None) -> None:
    if group is not None:
        store, number, size, seconds = group
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=number,
            world_size=size,
            timeout=datetime.timedelta(seconds=seconds),
        )
