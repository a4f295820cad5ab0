"""The arithmetic: torch's fused AdamW on views of each parameter, wherever they are, and the threads that it takes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from hf_longmoe.schedules.optimizer.plan import Bucket, Piece

__all__ = [
    "adamw",
    "copies",
    "gradients",
    "host_thread_count",
    "host_threads",
    "in_arena",
    "in_bucket",
    "needs_scratch",
    "update",
    "values",
]

logger = logging.getLogger(__name__)

Views = list[torch.Tensor]


def in_arena(memory: torch.Tensor, pieces: Sequence[Piece]) -> Views:
    """Each piece's part of an arena, or of memory laid out like one."""
    return [memory[piece.home : piece.home + piece.numel] for piece in pieces]


def in_bucket(memory: torch.Tensor, pieces: Sequence[Piece], start: int = 0) -> Views:
    """Each piece's part of memory that holds the bucket from its element `start` on."""
    return [memory[piece.at - start : piece.at - start + piece.numel] for piece in pieces]


def values(pieces: Sequence[Piece]) -> Views:
    return [piece.entry.value[piece.start : piece.stop] for piece in pieces]


def gradients(pieces: Sequence[Piece]) -> Views:
    return [piece.entry.grad[piece.start : piece.stop] for piece in pieces]


def copies(to: Views, of: Views) -> Callable[[], None]:
    """The copies, of any dtypes, yet to be launched."""
    return partial(torch._foreach_copy_, to, of) if to else lambda: None


def adamw(
    pieces: Sequence[Piece], weights: Views, grads: Views, firsts: Views, seconds: Views, scalar: torch.Tensor
) -> Callable[[], None]:
    """
    The update, yet to be launched: one kernel for all pieces of the same hyperparameters and step.

    Arguments:
        weights, grads, firsts, seconds: flat, float32, in the order of `pieces`, all on one device.
        scalar: one element on that device, for the step; one kernel after the other uses it.
    """
    kernels: dict[tuple, list[Views]] = {}
    for number, piece in enumerate(pieces):
        columns = kernels.setdefault(piece.entry.launch, [[], [], [], []])
        for column, views in zip(columns, (weights, grads, firsts, seconds), strict=True):
            column.append(views[number])

    def launch() -> None:
        for (lr, beta1, beta2, eps, weight_decay, step), columns in kernels.items():
            scalar.fill_(step)
            torch._fused_adamw_(
                *columns,
                [],
                [scalar] * len(columns[0]),
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
            )

    return launch


def update(
    bucket: Bucket, state: dict[str, Views], scratch: torch.Tensor | None, scalar: torch.Tensor
) -> Callable[[], None]:
    """
    The update of a bucket whose state and parameters are on one device, yet to be launched.

    Arguments:
        state: each piece's part of the moments and, in half precision, of the masters.
        scratch: float32, as long as the bucket, for gradients of another dtype.
    """
    pieces = bucket.pieces
    params, grads = values(pieces), gradients(pieces)
    weights, works = state.get("master", params), []
    if bucket.arena.half:
        fresh = [number for number, piece in enumerate(pieces) if piece.entry.fresh]
        works.append(copies([weights[n] for n in fresh], [params[n] for n in fresh]))
    cast = [number for number, grad in enumerate(grads) if grad.dtype != torch.float32]
    if cast:
        rooms = in_bucket(scratch, [pieces[number] for number in cast], pieces[0].at)
        works.append(copies(rooms, [grads[number] for number in cast]))
        for number, room in zip(cast, rooms, strict=True):
            grads[number] = room
    works.append(adamw(pieces, weights, grads, state["exp_avg"], state["exp_avg_sq"], scalar))
    if bucket.arena.half:
        works.append(copies(params, weights))

    def launch() -> None:
        for work in works:
            work()

    return launch


def needs_scratch(pieces: Sequence[Piece]) -> bool:
    return any(piece.entry.grad.dtype != torch.float32 for piece in pieces)


def host_thread_count() -> int:
    """Cores that this process may use, divided over the ranks of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)))


@contextlib.contextmanager
def host_threads(say: bool) -> Iterator[bool]:
    """
    torch's threads, raised to `host_thread_count` for what is inside: launchers set OMP_NUM_THREADS=1, which starves
    an update on the host. Yields whether they were raised, and says so in the log if `say`.
    """
    before, wanted = torch.get_num_threads(), host_thread_count()
    if wanted <= before:
        yield False
        return
    if say:
        logger.info("The optimizer's update on the host runs with %d threads in place of %d.", wanted, before)
    torch.set_num_threads(wanted)
    try:
        yield True
    finally:
        torch.set_num_threads(before)
