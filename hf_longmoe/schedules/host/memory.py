"""How much host memory there is, how much of it a run may take, and the slabs that it is taken in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil
import torch

from hf_longmoe.schedules.host.control_groups import control_group_memory
from hf_longmoe.schedules.host.engine import Engine, Job
from hf_longmoe.sizes import format_bytes

__all__ = ["HostBudget", "HostPool", "Slab", "check_host_memory", "host_memory_available"]


def host_memory_available() -> int:
    """Bytes that processes of this machine, or of this container where its limit is lower, can still take."""
    available, group = psutil.virtual_memory().available, control_group_memory()
    return available if group is None else min(available, group)


def check_host_memory(needed: int, what: str, ranks: int = 1) -> None:
    """
    Arguments:
        needed (`int`): bytes that this process is going to take.
        what (`str`): what for.
        ranks (`int`, defaults to 1): processes of this machine that take as much.

    Raises:
        `MemoryError`: the machine does not have it; the message has both numbers.
    """
    available = host_memory_available()
    if needed * ranks > available:
        each = f" on each of {ranks} local ranks, {format_bytes(needed * ranks)} in all" if ranks > 1 else ""
        raise MemoryError(
            f"{what} needs {format_bytes(needed)} of host memory{each}, but {format_bytes(available)} are free."
        )


class HostBudget:
    """
    What pools share: the bytes of host memory that they have taken, and may take.

    Arguments:
        limit (`int`, *optional*): bytes; unlimited by default.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.taken = limit, 0

    def take(self, nbytes: int) -> bool:
        """Whether so much more is within the limit; if so, it counts as taken."""
        if self.limit is not None and self.taken + nbytes > self.limit:
            return False
        self.taken += nbytes
        return True

    def give(self, nbytes: int) -> None:
        self.taken -= nbytes


@dataclass(eq=False)
class Slab:
    """`memory`: uint8, as long as it was first asked for. `after`: the jobs that still use it."""

    memory: torch.Tensor
    after: list[Job] = field(default_factory=list)

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first elements of the slab, one-dimensional."""
        return self.memory[: numel * dtype.itemsize].view(dtype)


class HostPool:
    """
    Host memory in slabs of exactly the sizes that were asked for, for one kind of use, kept from step to step.

    It never has more than what was in use at one time at most: where a larger slab is needed, idle ones are given
    back before it is made.

    Arguments:
        engine (`Engine`): whose copies they are for.
        budget (`HostBudget`): shared with other pools.
    """

    def __init__(self, engine: Engine, budget: HostBudget) -> None:
        self._engine, self._budget = engine, budget
        self._idle: list[Slab] = []
        self._used: set[Slab] = set()
        self._peak_used = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, in use or idle."""
        return sum(slab.memory.numel() for slab in (*self._idle, *self._used))

    def take(self, nbytes: int) -> Slab | None:
        """
        A slab of at least `nbytes`; None where the budget does not hold it.

        The jobs in its `after` come from earlier uses: hand them to the copy that writes to it.

        Raises:
            `MemoryError`: within the budget, but the machine does not have it.
        """
        fitting = [slab for slab in self._idle if slab.memory.numel() >= nbytes]
        if fitting:
            slab = min(fitting, key=lambda slab: slab.memory.numel())
            self._idle.remove(slab)
            self._used.add(slab)
            return slab
        in_use = sum(slab.memory.numel() for slab in self._used)
        self._peak_used = max(self._peak_used, in_use + nbytes)
        while self._idle and self.nbytes + nbytes > self._peak_used:
            self._drop(max(self._idle, key=lambda slab: slab.memory.numel()))
        if not self._budget.take(nbytes):
            return None
        try:
            check_host_memory(nbytes, "A slab")  # what is pinned is taken at once, and its lack kills the process
            slab = Slab(self._engine.host_empty(nbytes))
        except MemoryError:
            self._budget.give(nbytes)
            raise
        self._used.add(slab)
        return slab

    def give(self, slab: Slab, after: Sequence[Job] = ()) -> None:
        """Takes a slab back; what writes to it next begins after `after`."""
        self._used.remove(slab)
        slab.after = [job for job in (*slab.after, *after) if not self._engine.done(job)]
        self._idle.append(slab)

    def close(self) -> None:
        """Frees the idle slabs. Those in use are freed by a `close` after they were given back."""
        while self._idle:
            self._drop(self._idle[-1])
        self._peak_used = 0

    def _drop(self, slab: Slab) -> None:
        self._idle.remove(slab)
        for job in slab.after:
            self._engine.finish(job)
        self._engine.host_free(slab.memory)
        self._budget.give(slab.memory.numel())
