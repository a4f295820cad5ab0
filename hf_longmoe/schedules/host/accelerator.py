"""`AcceleratorEngine`: the copy streams of a real device (CUDA, XPU, ...), by torch's device-neutral streams."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_longmoe.schedules.host.engine import Engine, Job

__all__ = ["AcceleratorEngine", "has_own_memory"]


def has_own_memory(device: torch.device) -> bool:
    """Whether `device` has memory that is not the host's, and copy streams to it."""
    if device.type in ("cpu", "meta", "mps"):
        return False
    if device.type == "cuda":
        return not getattr(torch.cuda.get_device_properties(device), "is_integrated", 0)
    return True


class _Timed(Job):
    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self.start, self.end = (torch.Event(device, enable_timing=True) for _ in range(2))
        self.stream = stream
        self.start.record(stream)

    def ended(self) -> _Timed:
        self.end.record(self.stream)
        return self

    def seconds(self) -> float:
        return self.start.elapsed_time(self.end) / 1000


class AcceleratorEngine(Engine):
    """
    Arguments:
        device (`torch.device`): an accelerator with its index.

    Raises:
        `ValueError`: `device` shares the host's memory, so that there is nothing to copy.
    """

    def __init__(self, device: torch.device) -> None:
        if not has_own_memory(device):
            raise ValueError(f"device={device} uses the host's memory: there is nothing to offload to.")
        self.device = device
        self._down, self._up = torch.Stream(device), torch.Stream(device)
        self._registered: set[int] = set()

    def down(self, host: torch.Tensor, source: torch.Tensor, after: Sequence[Job] = ()) -> Job:
        return self._copy(self._down, host, source, after)

    def up(self, destination: torch.Tensor, host: torch.Tensor, after: Sequence[Job] = ()) -> Job:
        return self._copy(self._up, destination, host, after)

    def _copy(
        self, stream: torch.Stream, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Job]
    ) -> Job:
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        for job in after:
            stream.wait_event(job.end)
        job = _Timed(self.device, stream)
        with torch.no_grad(), stream:
            destination.copy_(source, non_blocking=True)
        return job.ended()

    def run(self, work: Callable[[], Any]) -> Job:
        job = _Timed(self.device, torch.accelerator.current_stream(self.device))
        work()
        return job.ended()

    def compute_waits(self, job: Job) -> None:
        torch.accelerator.current_stream(self.device).wait_event(job.end)

    def finish(self, job: Job) -> None:
        job.end.synchronize()

    def done(self, job: Job) -> bool:
        return job.end.query()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def host_empty(self, nbytes: int) -> torch.Tensor:
        # torch's pinned allocator rounds a size up to a power of two; memory that is registered keeps its own.
        memory = _host_memory(nbytes)
        if self.device.type != "cuda":
            return memory.pin_memory() if nbytes else memory
        if nbytes:
            error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0)
            if int(error) == 0:
                self._registered.add(memory.data_ptr())
            else:
                warnings.warn(
                    f"{nbytes} bytes of host memory could not be pinned ({error}): copies from and to them are slower,"
                    " and the host waits for them. A limit on locked memory (`ulimit -l`) may be the cause.",
                    stacklevel=3,
                )
        return memory

    def host_free(self, memory: torch.Tensor) -> None:
        if memory.data_ptr() in self._registered:
            self._registered.remove(memory.data_ptr())
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _host_memory(nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:  # the CPU allocator's way of saying so
        raise MemoryError(f"{nbytes} bytes of host memory are not there: {error}") from error
