"""Host memory beside the state: slabs that are given back together, and the room of the buckets under way."""

from __future__ import annotations

import contextlib

import torch

from hf_longmoe.schedules.host import Engine, Job

__all__ = ["Slabs", "Staging"]


class Slabs:
    """What an optimizer has taken of an engine's host memory, and the jobs that may be using it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.jobs: list[Job] = []
        self._taken: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8. Raises `MemoryError` where the host does not have it."""
        self._taken.append(self.engine.host_empty(nbytes))
        return self._taken[-1]

    def give(self, memory: torch.Tensor) -> None:
        self._taken = [other for other in self._taken if other is not memory]
        self.engine.host_free(memory)

    def close(self) -> None:
        """Everything, when nothing uses it any more."""
        for job in self.jobs:
            with contextlib.suppress(RuntimeError):
                self.engine.finish(job)
        self.jobs = []
        while self._taken:
            self.engine.host_free(self._taken.pop())


class Staging:
    """Room for buckets that the host updates; kept from step to step."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        self._rooms: dict[tuple[int, str], torch.Tensor] = {}
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    def room(self, number: int, what: str, elements: int) -> torch.Tensor:
        """float32, `elements` long. Its contents and those of a shorter one before it are lost."""
        old = self._rooms.get((number, what))
        if old is None or old.numel() < 4 * elements:
            if old is not None:
                self._slabs.give(self._rooms.pop((number, what)))
            self._rooms[number, what] = self._slabs.take(4 * elements)
        return self._rooms[number, what][: 4 * elements].view(torch.float32)

    def scratch(self, elements: int) -> torch.Tensor:
        """float32, for gradients that are cast; of the host alone."""
        if self._scratch.numel() < elements:
            self._scratch = torch.empty(elements, dtype=torch.float32, device="cpu")
        return self._scratch
