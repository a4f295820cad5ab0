"""`FakeEngine`: a device made of host memory, for tests. It does late whatever may be late, and forgives nothing."""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_longmoe.schedules.host.engine import Engine, Job

__all__ = ["FakeEngine"]


class _FakeJob(Job):
    def __init__(self, name: str, nbytes: int, rate: float, work: Callable[[], None], after: Sequence[Job]) -> None:
        self.name, self.nbytes, self.rate, self.work = name, nbytes, rate, work
        self.after: list[_FakeJob] = list(after)
        self.done = False

    def seconds(self) -> float:
        assert self.done, f"the time of {self.name} was asked for before it ended"
        return self.nbytes / self.rate


class _Memory:
    """A tensor's memory, which is not kept alive. To find it dead is what a real device would not report."""

    def __init__(self, tensor: torch.Tensor, whose: str) -> None:
        assert tensor.is_contiguous(), f"{whose} is not contiguous"
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.like = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        self.whose = whose

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise AssertionError(f"{self.whose} was freed before its copy had ended")
        dtype, *geometry = self.like
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, *geometry)


class FakeEngine(Engine):
    """
    CPU tensors play the device's. A copy runs at a random later moment, at the latest when it is waited for; until
    then its destination holds NaN (or, of integers, ones). A source, destination or host memory that is dropped
    before an `AssertionError`, since a device would read or write freed memory.

    Arguments:
        seed (`int`, defaults to 0): of the delays.
        eager (`float`, defaults to 0.3): how likely one more waiting copy runs at each call; 0: only when waited for.
        rate (`float`, defaults to 1e9): bytes a second that `Job.seconds` claims.

    Attributes:
        sent (`dict[str, int]`): bytes copied `"down"` and `"up"`.
        device_bytes, peak_device_bytes (`int`): from `empty`, alive now and at most.
        host_bytes, peak_host_bytes (`int`): from `host_empty`, now and at most.
        fail_at (`int`, *optional*): the copy, counted from now, that raises a `RuntimeError` when it is asked for.
        host_limit (`int`, *optional*): bytes above which `host_empty` raises.
    """

    def __init__(self, seed: int = 0, eager: float = 0.3, rate: float = 1e9) -> None:
        self.device = torch.device("cpu")
        self.sent = {"down": 0, "up": 0}
        self.device_bytes = self.peak_device_bytes = self.host_bytes = self.peak_host_bytes = 0
        self.fail_at: int | None = None
        self.host_limit: int | None = None
        self._random, self._eager, self._rate = random.Random(seed), eager, rate
        self._waiting: dict[str, deque[_FakeJob]] = {"down": deque(), "up": deque()}
        self._host: dict[int, torch.Tensor] = {}

    def down(self, host: torch.Tensor, source: torch.Tensor, after: Sequence[Job] = ()) -> Job:
        return self._copy("down", host, source, after)

    def up(self, destination: torch.Tensor, host: torch.Tensor, after: Sequence[Job] = ()) -> Job:
        return self._copy("up", destination, host, after)

    def _copy(self, stream: str, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Job]) -> Job:
        assert destination.shape == source.shape, f"{stream}: {destination.shape} from {source.shape}"
        assert destination.dtype == source.dtype, f"{stream}: {destination.dtype} from {source.dtype}"
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at = None
                raise RuntimeError(f"the copy {stream} failed, as asked")
        to, by = (
            _Memory(destination, f"the destination of a copy {stream}"),
            _Memory(source, f"what is copied {stream}"),
        )
        if all(job.done for job in after):  # else one of them may be reading it
            destination.detach().fill_(float("nan") if destination.is_floating_point() else 1)
        nbytes = source.numel() * source.element_size()

        def work() -> None:
            with torch.no_grad():
                to.tensor().copy_(by.tensor())
            self.sent[stream] += nbytes

        job = _FakeJob(f"a copy {stream}", nbytes, self._rate, work, after)
        self._waiting[stream].append(job)
        self._drift()
        return job

    def run(self, work: Callable[[], Any]) -> Job:
        self._drift()
        work()
        job = _FakeJob("a computation", 0, self._rate, lambda: None, ())
        job.done = True
        return job

    def compute_waits(self, job: Job) -> None:
        self._complete(job)
        self._drift()

    def finish(self, job: Job) -> None:
        self.compute_waits(job)

    def done(self, job: Job) -> bool:
        self._drift()
        return job.done

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(numel, dtype=dtype, device="cpu")
        nbytes = memory.numel() * memory.element_size()
        self.device_bytes += nbytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
        weakref.finalize(memory.untyped_storage(), self._freed, nbytes)
        return memory.fill_(float("nan") if memory.is_floating_point() else 1)

    def _freed(self, nbytes: int) -> None:
        self.device_bytes -= nbytes

    def host_empty(self, nbytes: int) -> torch.Tensor:
        if self.host_limit is not None and self.host_bytes + nbytes > self.host_limit:
            raise MemoryError(f"{nbytes} bytes of host memory are not there")
        # Of the interpreter's: no probe of tensors takes it for the device's.
        memory = (
            torch.frombuffer(bytearray(b"\1") * nbytes, dtype=torch.uint8)
            if nbytes
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        self._host[id(memory)] = memory
        self.host_bytes += nbytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
        return memory

    def host_free(self, memory: torch.Tensor) -> None:
        assert self._host.pop(id(memory), None) is not None, "host memory freed twice, or never given"
        self.host_bytes -= memory.numel()

    def waiting(self) -> int:
        """Copies that have not ended."""
        return sum(map(len, self._waiting.values()))

    def _drift(self) -> None:
        while self._eager and self._random.random() < self._eager:
            ready = [queue[0] for queue in self._waiting.values() if queue and all(j.done for j in queue[0].after)]
            if not ready:
                return
            self._complete(self._random.choice(ready))

    def _complete(self, job: _FakeJob) -> None:
        """Runs `job`, what it comes after, and what stands before it in its stream."""
        queue = next((queue for queue in self._waiting.values() if job in queue), ())
        while not job.done:
            first = queue[0]
            for earlier in first.after:
                self._complete(earlier)
            if not first.done:  # else one of the above has run it
                first.work()  # where it fails it stays, so that whoever waits next is told too
                queue.popleft()
                first.done, first.after = True, []
