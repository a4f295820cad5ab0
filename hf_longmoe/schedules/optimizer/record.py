"""What a step has launched: to wait for, to time, and to know after a failure how far each parameter came."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_longmoe.schedules.host import Engine, Job
from hf_longmoe.schedules.optimizer.arena import Entry
from hf_longmoe.schedules.optimizer.plan import Piece

__all__ = ["STAGES", "Record", "Timings"]

STAGES = ("down", "accelerator", "host", "up")


@dataclass(frozen=True)
class Timings:
    """
    Of one step.

    Arguments:
        seconds (`dict[str, float]`): that each stage was busy: `"down"` and `"up"` (copies), `"accelerator"` and
            `"host"` (updates, with what is packed and cast for them).
        nbytes (`dict[str, int]`): copied `"down"` and `"up"`.
        elements (`dict[str, int]`): updated on the `"accelerator"` and on the `"host"`.
        step (`float`): seconds that `step()` held the host.
    """

    seconds: dict[str, float]
    nbytes: dict[str, int]
    elements: dict[str, int]
    step: float

    @property
    def serial(self) -> float:
        """Seconds if no stage overlapped another: the sum."""
        return sum(self.seconds.values())

    @property
    def shortest(self) -> float:
        """Seconds that no overlap can get below: the largest stage."""
        return max(self.seconds.values())

    @property
    def bound(self) -> float:
        """How many times faster than serial a step with these stages can be at most: sum / max."""
        return self.serial / self.shortest if self.shortest else 1.0


class Record:
    """
    Launches through an `Engine` and keeps what it launched. None of the memory that a job uses is kept alive here.

    Arguments:
        engine (`Engine`, *optional*): None where there is nothing to copy.
    """

    def __init__(self, engine: Engine | None) -> None:
        self.engine = engine
        self.jobs: list[tuple[str, Job]] = []
        self.nbytes, self.elements = Counter(down=0, up=0), Counter(accelerator=0, host=0)
        self.host_seconds = self.step_seconds = 0.0
        self.complete = False  # set when nothing has failed
        self._touched: Counter[Entry] = Counter()
        self._done: Counter[Entry] = Counter()

    def down(self, host: torch.Tensor, source: torch.Tensor, after: Sequence[Job] = ()) -> Job:
        return self._kept("down", self.engine.down(host, source, after), source)

    def up(self, destination: torch.Tensor, host: torch.Tensor, after: Sequence[Job] = ()) -> Job:
        return self._kept("up", self.engine.up(destination, host, after), host)

    def run(self, work: Callable[[], Any]) -> Job:
        return self._kept("accelerator", self.engine.run(work))

    def _kept(self, stage: str, job: Job, copied: torch.Tensor | None = None) -> Job:
        self.jobs.append((stage, job))
        if copied is not None:
            self.nbytes[stage] += copied.numel() * copied.element_size()
        return job

    def touched(self, pieces: Iterable[Piece]) -> None:
        """From here on these ranges are neither as before the step nor as after it, until they are `done`."""
        self._touched.update(self._elements(pieces))

    def done(self, pieces: Iterable[Piece], where: str) -> None:
        """Their update is complete, or all of it has been launched."""
        elements = self._elements(pieces)
        self._done.update(elements)
        self.elements[where] += sum(elements.values())

    @staticmethod
    def _elements(pieces: Iterable[Piece]) -> Counter[Entry]:
        found: Counter[Entry] = Counter()
        for piece in pieces:
            found[piece.entry] += piece.numel
        return found

    def whole(self, entry: Entry) -> bool:
        return self._done[entry] == entry.numel > 0 or self.complete

    def half_done(self, entry: Entry) -> bool:
        return self._touched[entry] > 0 and not self.whole(entry)

    def include(self, part: Record) -> None:
        """Adds what a part of the same step has launched."""
        self.jobs += part.jobs
        self.nbytes.update(part.nbytes)
        self.elements.update(part.elements)
        self.host_seconds += part.host_seconds
        self._touched.update(part._touched)
        self._done.update(part._done)

    def finish(self) -> None:
        """The host waits for everything launched."""
        for _, job in reversed(self.jobs):
            self.engine.finish(job)

    def drain(self) -> None:
        """As `finish`, after a failure: a device that does not answer any more does not hide what happened first."""
        for _, job in reversed(self.jobs):
            with contextlib.suppress(RuntimeError):
                self.engine.finish(job)

    def timings(self) -> Timings:
        self.finish()
        seconds = dict.fromkeys(STAGES, 0.0)
        for stage, job in self.jobs:
            seconds[stage] += job.seconds()
        seconds["host"] += self.host_seconds
        return Timings(seconds, dict(self.nbytes), dict(self.elements), self.step_seconds)
