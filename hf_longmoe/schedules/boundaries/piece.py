"""`Piece`: one tensor between forward and backward: on the device, on its way down, in host memory, on its way up."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hf_longmoe.schedules.boundaries.layout import Layout
from hf_longmoe.schedules.host import Engine, HostPool, Job, Slab

__all__ = ["Carrier", "Piece"]


class Carrier:
    """
    What the pieces of one model share: the engine, a lock, and what the dead have left.

    A piece may die at any moment and in any thread, also while the lock is held (the garbage collector runs where it
    likes). So it only leaves here what it held, for whoever has the lock, or gets it, to take apart.

    Arguments:
        engine (`Engine`): does the copies.
        restored (callable, *optional*): is given the flat memory of each tensor that is brought back, when it is made.
    """

    def __init__(self, engine: Engine, restored: Callable[[torch.Tensor], None] | None) -> None:
        self.engine, self.restored = engine, restored
        self.sent = {"down": 0, "up": 0}
        self.closed = self._warned = False
        self._lock = threading.Lock()
        self._left: deque[tuple[HostPool, Slab | None, Sequence[Job], Sequence[Job], tuple]] = deque()

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.take_apart()
        try:
            with self._lock:
                yield
        finally:
            self.take_apart()

    def leave(self, pool: HostPool, slab: Slab, jobs: Sequence[Job], device: Sequence[tuple]) -> None:
        """
        Gives `slab` back, which `jobs` still use; `device`: pairs of a tensor on the device and the job that uses it.
        """
        self._left.append((pool, slab, jobs, [job for _, job in device], tuple(tensor for tensor, _ in device)))
        self.take_apart()

    def abandon(self, *pools: HostPool) -> None:
        """Nobody offloads through this any more: frees what is idle in `pools`, and later the rest."""
        self.closed = True
        self._left += [(pool, None, (), (), ()) for pool in pools]
        self.take_apart()

    def take_apart(self) -> None:
        while self._left and self._lock.acquire(blocking=False):
            try:
                while self._left:
                    pool, slab, jobs, unfinished, tensors = self._left.popleft()
                    for job in unfinished:  # by the host: which stream will reuse the memory is not known here
                        self.engine.finish(job)
                    del tensors
                    if slab is not None:
                        pool.give(slab, jobs)
                    if self.closed:
                        pool.close()
            finally:
                self._lock.release()

    def take(self, pool: HostPool, nbytes: int) -> Slab | None:
        try:
            return pool.take(nbytes)
        except MemoryError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(f"Checkpoint boundaries stay on the device from here on: {error}", stacklevel=2)
            return None


class Piece:
    """
    All methods but `close` are to be called with the carrier's lock held.

    Arguments:
        flat (`torch.Tensor`): its memory on the device, one-dimensional.
        layout (`Layout`): of the tensor.
    """

    def __init__(self, carrier: Carrier, pool: HostPool, flat: torch.Tensor, layout: Layout) -> None:
        self._carrier, self._pool, self._layout = carrier, pool, layout
        self._flat: torch.Tensor | None = flat
        self._version, self._changed = flat._version, False
        self._numel, self._dtype = flat.numel(), flat.dtype
        self._slab: Slab | None = None
        self._down: Job | None = None
        self._waited = False  # whether computation has waited for `_down`
        self._coming: tuple[torch.Tensor, Job] | None = None
        self._up: Job | None = None  # the last one: copies up run in order

    @property
    def _nbytes(self) -> int:
        return self._numel * self._dtype.itemsize

    def _changed_since(self) -> bool:
        self._changed = self._changed or (self._flat is not None and self._flat._version != self._version)
        return self._changed

    def send(self) -> bool:
        """Begins the copy to host memory; False where there is no room for it."""
        if self._changed_since():  # it would be refused anyway
            return False
        slab = self._carrier.take(self._pool, self._nbytes)
        if slab is None:
            return False
        try:
            self._down = self._carrier.engine.down(slab.view(self._numel, self._dtype), self._flat, after=slab.after)
        except BaseException:
            self._pool.give(slab)
            raise
        self._slab = slab
        self._carrier.sent["down"] += self._nbytes
        return True

    def retire(self) -> None:
        """Lets go of the device's memory, if it was sent; computation waits for the copy."""
        if self._flat is None or self._down is None:
            return
        self._wait_for_down()
        self._changed_since()
        self._flat = None

    def _wait_for_down(self) -> None:
        if not self._waited:
            self._carrier.engine.compute_waits(self._down)
            self._waited = True

    def fetch(self) -> None:
        """Begins the copy back, unless it is on the device or on its way to it."""
        if self._flat is not None or self._coming is not None or self._slab is None or self._changed:
            return
        engine = self._carrier.engine
        flat = engine.empty(self._numel, self._dtype)
        if self._carrier.restored is not None:
            self._carrier.restored(flat)
        self._up = engine.up(flat, self._slab.view(self._numel, self._dtype), after=[self._down])
        self._coming = flat, self._up
        self._carrier.sent["up"] += self._nbytes

    def hand_out(self) -> torch.Tensor:
        """
        The tensor. What was brought back is forgotten here, and brought back once more if it is asked for again.

        Raises:
            `RuntimeError`: it was changed in place while its value was still wanted.
        """
        if self._changed_since():
            raise RuntimeError(
                f"The input of a checkpointed layer, or what it kept for its replay, {self._dtype} of shape"
                f" {list(self._layout.shape)}, was changed in place before its copy to host memory had ended: backward"
                " would use the wrong values. Do not change it in place between forward and backward."
            )
        if self._flat is not None:
            if self._down is not None:
                self._wait_for_down()  # so that nobody has to when this dies
            return self._layout.restore(self._flat)
        self.fetch()
        if self._coming is None:
            raise RuntimeError("A tensor in host memory was asked for after its graph had let go of it.")
        (flat, job), self._coming = self._coming, None
        self._carrier.engine.compute_waits(job)
        return self._layout.restore(flat)

    def close(self) -> None:
        """Gives everything back; copies under way may end first. Safe to call twice."""
        device = [] if self._coming is None else [self._coming]
        if self._flat is not None and self._down is not None and not self._waited:
            device.append((self._flat, self._down))
        slab, self._slab, self._coming, self._flat = self._slab, None, None, None
        if slab is not None:
            jobs = [job for job in (self._down, self._up) if job is not None]
            self._carrier.leave(self._pool, slab, jobs, device)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()
