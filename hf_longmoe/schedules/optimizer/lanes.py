"""
The two ways of a bucket: up, updated on the device, and back (`AcceleratorLane`); or its gradient down, updated on the
host, and the parameter up (`HostLane`).

Both hold at most `slots` buckets. `start` launches the first copies of a bucket, `end` does the rest of the oldest
one, so that with two slots a bucket is on its way while the one before it is updated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hf_longmoe.schedules.host import Job
from hf_longmoe.schedules.optimizer.arena import ALIGN
from hf_longmoe.schedules.optimizer.early import EarlyGradients
from hf_longmoe.schedules.optimizer.plan import Bucket, Piece
from hf_longmoe.schedules.optimizer.record import Record
from hf_longmoe.schedules.optimizer.staging import Staging
from hf_longmoe.schedules.optimizer.update import adamw, copies, gradients, in_arena, in_bucket, update, values

__all__ = ["AcceleratorLane", "HostLane"]


@dataclass(eq=False)
class _Slot:
    memory: torch.Tensor
    after: list[Job] = field(default_factory=list)  # what still reads or writes it

    def row(self, number: int, numel: int, each: int) -> torch.Tensor:
        return self.memory[number * each : number * each + numel]


class AcceleratorLane:
    """
    Arguments:
        record (`Record`): launches, and keeps count.
        elements (`int`): of the largest bucket.
        slots (`int`): buckets on the device at once.
        rows (`int`): 2 where only moments travel; 3 with gradients of another dtype; 4 with masters.
    """

    def __init__(self, record: Record, elements: int, slots: int, rows: int) -> None:
        self._record, self._elements, self._count, self._rows = record, elements, slots, rows
        self._slots: list[_Slot] = []
        self._scalar: torch.Tensor | None = None
        self._pending: deque[tuple[Bucket, _Slot, Job]] = deque()
        self._started = 0

    @property
    def full(self) -> bool:
        return len(self._pending) == self._count

    def start(self, bucket: Bucket) -> None:
        slot, arena = self._slot(), bucket.arena
        rows = self._state_rows(bucket, slot)
        if arena.half and all(piece.entry.fresh for piece in bucket.pieces):
            del rows["master"]
        for kind, row in rows.items():
            for run in bucket.runs():
                home = arena.flats[kind][run.home : run.home + run.numel]
                job = self._record.up(row[run.at : run.at + run.numel], home, slot.after)
        self._pending.append((bucket, slot, job))

    def end(self) -> None:
        bucket, slot, job = self._pending.popleft()
        self._record.engine.compute_waits(job)
        state = {kind: in_bucket(row, bucket.pieces) for kind, row in self._state_rows(bucket, slot).items()}
        room = slot.row(self._rows - 1, bucket.numel, self._elements)
        work = update(bucket, state, room, self._scalar)
        self._record.touched(bucket.pieces)
        self._record.run(work)
        for kind, row in self._state_rows(bucket, slot).items():
            for run in bucket.runs():
                home = bucket.arena.flats[kind][run.home : run.home + run.numel]
                job = self._record.down(home, row[run.at : run.at + run.numel])
        slot.after = [job]
        self._record.done(bucket.pieces, "accelerator")

    def _slot(self) -> _Slot:
        number = self._started % self._count
        self._started += 1
        if number == len(self._slots):
            memory = self._record.engine.empty(self._rows * self._elements + ALIGN, torch.float32)
            self._scalar = memory[-1:] if self._scalar is None else self._scalar
            self._slots.append(_Slot(memory))
        return self._slots[number]

    def _state_rows(self, bucket: Bucket, slot: _Slot) -> dict[str, torch.Tensor]:
        return {kind: slot.row(number, bucket.numel, self._elements) for number, kind in enumerate(bucket.arena.kinds)}

    def flush(self) -> None:
        """Ends what was started."""
        while self._pending:
            self.end()

    def release(self) -> None:
        """Gives the slots back. What the device does from here on begins after they were last used."""
        for slot in self._slots:
            for job in slot.after:
                self._record.engine.compute_waits(job)
        self._slots.clear()
        self._scalar = None


@dataclass(eq=False)
class _Desk:
    """A bucket's room for gradients on the host, and on the device where its pieces are packed into one transfer."""

    grads: torch.Tensor
    memory: torch.Tensor | None = None
    up: Job | None = None
    unpack: Callable[[], None] | None = None


@dataclass(eq=False)
class _Out:
    """
    A bucket's room for parameters on the host. There is one more than desks: they are on their way up while the desk
    takes the next gradients.
    """

    weights: torch.Tensor
    up: Job | None = None


class HostLane:
    """
    Arguments:
        record (`Record`): launches, and keeps count.
        elements (`int`): of the largest bucket.
        slots (`int`): buckets under way at once.
        staging (`Staging`): host memory for them, kept from step to step.
        early (`Early`, *optional*): gradients that have come down during backward.
    """

    def __init__(
        self, record: Record, elements: int, slots: int, staging: Staging, early: EarlyGradients | None = None
    ) -> None:
        self._record, self._elements, self._count, self._early = record, elements, slots, early
        self._staging = staging
        self._desks: list[_Desk] = []
        self._outs: list[_Out] = []
        self._pending: deque[tuple[Bucket, _Desk, _Out, torch.dtype, Job | None]] = deque()
        self._started = 0

    @property
    def full(self) -> bool:
        return len(self._pending) == self._count

    def start(self, bucket: Bucket) -> None:
        desk, out, pieces = self._desk(), self._out(), bucket.pieces
        self._started += 1
        job, dtype = None, self._dtype(pieces)
        if self._early is None:
            job = self._down(desk, 0, desk.grads, bucket, gradients(pieces), dtype)
        if not bucket.arena.half or any(piece.entry.fresh for piece in pieces):
            after = () if out.up is None else (out.up,)
            job = self._down(desk, 1, out.weights, bucket, values(pieces), bucket.arena.dtype, after)
        self._pending.append((bucket, desk, out, dtype, job))

    def end(self) -> None:
        bucket, desk, out, dtype, job = self._pending.popleft()
        engine, pieces = self._record.engine, bucket.pieces
        for earlier in (out.up, job):
            if earlier is not None:
                engine.finish(earlier)
        if self._early is not None:
            self._early.finish(pieces)
        weights = _as(out.weights, bucket.arena.dtype)
        begun = time.perf_counter()
        self._record.touched(pieces)
        for block in bucket.blocks if bucket.arena.half or dtype != torch.float32 else [bucket]:
            self._update(block, weights, None if self._early else _as(desk.grads, dtype))
        self._record.host_seconds += time.perf_counter() - begun
        desk.up = out.up = self._up(desk, bucket, weights)
        self._record.done(pieces, "host")

    def flush(self) -> None:
        """Ends what was started. What the device does from here on begins after the parameters have come."""
        while self._pending:
            self.end()
        for desk in self._desks:
            if desk.up is not None:
                self._record.engine.compute_waits(desk.up)
            self._settle(desk)

    def release(self) -> None:
        """Gives the memory of the device back."""
        self._desks.clear()
        self._outs.clear()

    # -- on the host ------------------------------------------------------------------------------------------------
    def _update(self, block: Bucket, weights: torch.Tensor, grads: torch.Tensor | None) -> None:
        arena, pieces = block.arena, block.pieces
        moments = (in_arena(arena.flats[kind], pieces) for kind in arena.kinds[:2])
        masters = in_arena(arena.flats["master"], pieces) if arena.half else in_bucket(weights, pieces)
        scalar = torch.empty((), dtype=torch.float32, device="cpu")
        if arena.half:
            fresh = [number for number, piece in enumerate(pieces) if piece.entry.fresh]
            copies([masters[n] for n in fresh], in_bucket(weights, [pieces[n] for n in fresh]))()
        if grads is None:
            views = self._early.views(pieces)
        else:
            views = in_bucket(grads, pieces)
        if views[0].dtype != torch.float32:
            views = self._cast(block, views)
        adamw(pieces, masters, views, *moments, scalar)()
        if arena.half:
            for run in block.runs():
                weights[run.at : run.at + run.numel].copy_(arena.flats["master"][run.home : run.home + run.numel])

    def _cast(self, block: Bucket, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        rooms = in_bucket(self._staging.scratch(block.numel), block.pieces, block.pieces[0].at)
        copies(rooms, grads)()
        return rooms

    # -- between host and device ------------------------------------------------------------------------------------
    def _down(
        self,
        desk: _Desk,
        area: int,
        host: torch.Tensor,
        bucket: Bucket,
        sources: list[torch.Tensor],
        dtype: torch.dtype,
        after: Sequence[Job] = (),
    ) -> Job:
        if len(sources) == 1 and sources[0].dtype == dtype:
            return self._record.down(_as(host, dtype)[: sources[0].numel()], sources[0], after)
        if area == 1:
            self._settle(desk)
        packed = self._area(desk, area, dtype)[: bucket.numel]
        self._record.run(copies(in_bucket(packed, bucket.pieces), sources))
        return self._record.down(_as(host, dtype)[: bucket.numel], packed, after)

    def _up(self, desk: _Desk, bucket: Bucket, weights: torch.Tensor) -> Job:
        self._settle(desk)
        params = values(bucket.pieces)
        if len(params) == 1:
            return self._record.up(params[0], weights[: params[0].numel()])
        packed = self._area(desk, 1, bucket.arena.dtype)[: bucket.numel]
        desk.unpack = copies(params, in_bucket(packed, bucket.pieces))
        return self._record.up(packed, weights[: bucket.numel])

    def _settle(self, desk: _Desk) -> None:
        """Packed parameters that have come, or will, go to their places."""
        if desk.unpack is not None:
            self._record.engine.compute_waits(desk.up)
            self._record.run(desk.unpack)
            desk.unpack = None

    def _desk(self) -> _Desk:
        number = self._started % self._count
        if number == len(self._desks):
            self._desks.append(_Desk(self._staging.room(number, "gradients", self._elements)))
        return self._desks[number]

    def _out(self) -> _Out:
        number = self._started % (self._count + 1)
        if number == len(self._outs):
            self._outs.append(_Out(self._staging.room(number, "weights", self._elements)))
        return self._outs[number]

    def _area(self, desk: _Desk, number: int, dtype: torch.dtype) -> torch.Tensor:
        if desk.memory is None:
            desk.memory = self._record.engine.empty(2 * self._elements, torch.float32)
        return _as(desk.memory[number * self._elements : (number + 1) * self._elements], dtype)

    @staticmethod
    def _dtype(pieces: list[Piece]) -> torch.dtype:
        found = {piece.entry.grad_dtype for piece in pieces}
        return found.pop() if len(found) == 1 else torch.float32


def _as(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return memory.view(dtype)
