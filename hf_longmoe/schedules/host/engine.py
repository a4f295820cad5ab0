"""`Engine`: what the offloaded schedules ask of a device. The real one is in accelerator.py, a fake one in fake.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Engine", "Job"]


class Job(ABC):
    """A copy, or a piece of computation, that an `Engine` was given."""

    @abstractmethod
    def seconds(self) -> float:
        """How long it ran. It must have ended: see `Engine.finish`."""


class Engine(ABC):
    """
    Copies between a device and host memory beside computation: one stream down, one up; each in order.

    A copy begins after everything that was launched on the calling thread's current stream of the device, and after
    the jobs in `after`. Both its tensors must live, unchanged, until somebody who may reuse their memory has waited
    for it: the device's (`compute_waits`) or the host (`finish`). Nothing here waits by itself.

    Attributes:
        device (`torch.device`): whose memory is the other side.
    """

    device: torch.device

    @abstractmethod
    def down(self, host: torch.Tensor, source: torch.Tensor, after: Sequence[Job] = ()) -> Job:
        """Copies `source`, on the device, into `host`: same size and dtype, contiguous."""

    @abstractmethod
    def up(self, destination: torch.Tensor, host: torch.Tensor, after: Sequence[Job] = ()) -> Job:
        """Copies `host` into `destination`, on the device: same size and dtype, contiguous."""

    @abstractmethod
    def run(self, work: Callable[[], Any]) -> Job:
        """Launches computation on the device, after everything launched before. `work` launches it and returns."""

    @abstractmethod
    def compute_waits(self, job: Job) -> None:
        """What is launched on the calling thread's current stream from here on begins after `job`."""

    @abstractmethod
    def finish(self, job: Job) -> None:
        """The host waits for `job`."""

    @abstractmethod
    def done(self, job: Job) -> bool:
        """Whether `job` has ended, without waiting."""

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """One-dimensional memory of the device, from its allocator, in the order of the current stream."""

    @abstractmethod
    def host_empty(self, nbytes: int) -> torch.Tensor:
        """
        Host memory that copies can run beside computation from: exactly `nbytes` elements of uint8.

        Raises:
            `MemoryError`: there is not so much.
        """

    @abstractmethod
    def host_free(self, memory: torch.Tensor) -> None:
        """Takes back what `host_empty` gave. No job may be using it."""
