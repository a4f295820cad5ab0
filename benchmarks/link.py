"""A device behind a link of a given speed, played by this machine: what pipelines are timed on."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hf_longmoe.schedules.host import Engine, Job

__all__ = ["LinkEngine", "paced"]


class _Work(Job):
    def __init__(self, after: Sequence[Job]) -> None:
        self.after: tuple[Any, ...] = tuple(after)
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.took = 0.0

    def seconds(self) -> float:
        return self.took


class _Stream:
    """
    A thread that does one thing after the other. What takes `nbytes / rate` seconds ends so long after it could
    begin: time lost to a late wake-up is not added to what comes next.
    """

    def __init__(self, rate: float | None) -> None:
        self.last = _Work(())
        self.last.ended.set()
        self._rate, self._free = rate, 0.0
        self._queue: queue.SimpleQueue[tuple[_Work, Callable[[], Any], int] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def submit(self, work: Callable[[], Any], after: Sequence[Job], nbytes: int = 0) -> _Work:
        self.last = _Work(after)
        self._queue.put((self.last, work, nbytes))
        return self.last

    def close(self) -> None:
        self._queue.put(None)

    def _serve(self) -> None:
        torch.set_num_threads(1)
        while (item := self._queue.get()) is not None:
            job, work, nbytes = item
            waited = [earlier for earlier in job.after if not earlier.ended.is_set()]
            for earlier in waited:
                earlier.ended.wait()
            now = time.perf_counter()
            begun = now if waited or not self._rate else max(self._free, now - 0.001)
            try:
                with torch.no_grad():
                    work()
            except BaseException as error:
                job.error = error
            if self._rate:
                self._free = begun + nbytes / self._rate
                time.sleep(max(0.0, self._free - time.perf_counter()))
            job.took = nbytes / self._rate if self._rate else time.perf_counter() - now
            job.after = ()
            job.ended.set()


class LinkEngine(Engine):
    """
    CPU tensors play the device's; a thread for each direction of the link, which is busy for bytes / rate, and one for
    the device's computation, which is done by this machine.

    Arguments:
        rate (`float`): bytes a second of each direction.
    """

    def __init__(self, rate: float) -> None:
        self.device = torch.device("cpu")
        self._streams = {"down": _Stream(rate), "up": _Stream(rate), "compute": _Stream(None)}

    def down(self, host: torch.Tensor, source: torch.Tensor, after: Sequence[Job] = ()) -> Job:
        return self._copy("down", host, source, after)

    def up(self, destination: torch.Tensor, host: torch.Tensor, after: Sequence[Job] = ()) -> Job:
        return self._copy("up", destination, host, after)

    def _copy(self, stream: str, to: torch.Tensor, of: torch.Tensor, after: Sequence[Job]) -> Job:
        to = to.detach()
        after = (*after, self._streams["compute"].last)
        return self._streams[stream].submit(lambda: to.copy_(of), after, of.numel() * of.element_size())

    def run(self, work: Callable[[], Any]) -> Job:
        return self._streams["compute"].submit(work, ())

    def compute_waits(self, job: Job) -> None:
        self._streams["compute"].submit(lambda: None, (job,))

    def finish(self, job: Job) -> None:
        job.ended.wait()
        if job.error is not None:
            raise RuntimeError(f"a job of the simulated device failed: {job.error}") from job.error

    def done(self, job: Job) -> bool:
        return job.ended.is_set()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def host_empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def host_free(self, memory: torch.Tensor) -> None:
        pass

    def idle(self) -> None:
        """Waits for everything launched."""
        for stream in self._streams.values():
            self.finish(stream.last)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


@contextlib.contextmanager
def paced(owner: type, method: str, seconds: Callable[..., float]) -> Iterator[None]:
    """`owner.method` takes `seconds(*arguments)`, those without `self`, at least; what it loses it makes up for."""
    plain, debt = getattr(owner, method), 0.0

    def slow(self: Any, *arguments: Any) -> Any:
        nonlocal debt
        begun = time.perf_counter()
        result = plain(self, *arguments)
        until = begun + seconds(*arguments) - debt
        time.sleep(max(0.0, until - time.perf_counter()))
        debt = min(0.001, max(0.0, time.perf_counter() - until))
        return result

    setattr(owner, method, slow)
    try:
        yield
    finally:
        setattr(owner, method, plain)
