"""Gradients that travel down while backward goes on, and leave the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from hf_longmoe.schedules.host import Job
from hf_longmoe.schedules.optimizer.arena import Arena, Entry, local, same_order
from hf_longmoe.schedules.optimizer.plan import Piece
from hf_longmoe.schedules.optimizer.staging import Slabs

__all__ = ["EarlyGradients"]


class EarlyGradients:
    """
    Host memory for the gradients of all streamed parameters, laid out as their arenas are.

    Arguments:
        slabs (`Slabs`): where host memory comes from.
        most (`int`): bytes of gradients that are on the device for their copy alone. The device's later work waits
            for those beyond.
    """

    def __init__(self, slabs: Slabs, most: int) -> None:
        self._slabs, self._engine, self._most = slabs, slabs.engine, most
        self._memory: dict[Arena, torch.Tensor] = {}
        self._jobs: dict[Entry, Job] = {}
        self._alive: deque[tuple[Job, torch.Tensor]] = deque()

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._jobs

    def take(self, entry: Entry) -> None:
        """
        Sends the gradient of a parameter down, and takes it from the parameter.

        Raises:
            `RuntimeError`: there is one since the last step already, or it is not one that can travel.
        """
        grad = entry.param.grad
        if grad is None:
            return
        if entry in self._jobs:
            raise RuntimeError(
                f"early_gradients=True: {entry.name} has a second gradient before step(). The first has left the "
                "device, so that gradients cannot be accumulated; use early_gradients=False for that."
            )
        if grad.layout != torch.strided or grad.dtype != entry.arena.dtype:
            raise RuntimeError(
                f"early_gradients=True: the gradient of {entry.name} is {grad.dtype} and {grad.layout}; it wants "
                f"{entry.arena.dtype} and torch.strided. Use early_gradients=False."
            )
        with torch.no_grad():
            source = same_order(local(grad), local(entry.param))
            self._jobs[entry] = job = self._engine.down(self._range(entry, 0, entry.numel), source)
        entry.param.grad = None
        self._alive.append((job, source))
        while self._alive and self._engine.done(self._alive[0][0]):
            self._alive.popleft()
        while sum(grad.numel() * grad.element_size() for _, grad in self._alive) > self._most:
            self._engine.compute_waits(self._alive[0][0])
            self._alive.popleft()  # its memory is used again by what is launched from here on

    def views(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        return [self._range(piece.entry, piece.start, piece.stop) for piece in pieces]

    def finish(self, pieces: Sequence[Piece]) -> None:
        """The host waits for these gradients."""
        for piece in pieces:
            self._engine.finish(self._jobs[piece.entry])

    def clear(self) -> None:
        """Forgets all gradients, those under way too."""
        for job in self._jobs.values():
            self._engine.finish(job)
        self._jobs.clear()
        self._alive.clear()

    def _range(self, entry: Entry, start: int, stop: int) -> torch.Tensor:
        arena = entry.arena
        if arena not in self._memory:
            self._memory[arena] = self._slabs.take(arena.numel * arena.dtype.itemsize).view(arena.dtype)
        return self._memory[arena][entry.offset + start : entry.offset + stop]
