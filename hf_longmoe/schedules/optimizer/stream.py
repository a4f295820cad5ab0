"""One step's buckets through the lanes, and the first real step's choice between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_longmoe.schedules.host import Job
from hf_longmoe.schedules.optimizer.arena import ALIGN, Entry
from hf_longmoe.schedules.optimizer.choose import best_share
from hf_longmoe.schedules.optimizer.early import EarlyGradients
from hf_longmoe.schedules.optimizer.lanes import AcceleratorLane, HostLane
from hf_longmoe.schedules.optimizer.plan import BOTH_WAYS, ONE_WAY, Bucket, Cuts, capacity, cut, interleave
from hf_longmoe.schedules.optimizer.record import Record, Timings
from hf_longmoe.schedules.optimizer.staging import Staging

__all__ = ["Stream"]

_SAMPLE = 4  # buckets of each way that are timed; one before them is not


class Stream:
    """
    Arguments:
        nbytes (`int`): of device memory for a slot: a hard limit.
        slots (`int`): how many.
        staging (`Staging`): host memory for buckets under way.
    """

    def __init__(self, nbytes: int, slots: int, staging: Staging) -> None:
        self._nbytes, self._slots, self._staging = nbytes, slots, staging
        self._cuts = Cuts()

    def step(self, entries: Sequence[Entry], share: float, record: Record, early: EarlyGradients | None) -> Job | None:
        """
        Updates `entries`, the first `share` of their elements on the accelerator. Returns the job after which the
        parameters are new; what the device does later begins after all of it.
        """
        most = capacity(self._nbytes, ONE_WAY if share in (0.0, 1.0) else BOTH_WAYS)
        return self._run(self._cuts.of(entries, most), share, record, early)

    def choose(self, entries: Sequence[Entry], both: bool, record: Record) -> tuple[float, Job | None]:
        """
        As `step`, with the share that some of these buckets, timed, speak for; also returns it.
        """
        most = capacity(self._nbytes, BOTH_WAYS)
        if not (total := sum(entry.numel for entry in entries)):
            return 1.0, None
        several = max(ALIGN, total // (4 * (_SAMPLE + 1)) // ALIGN * ALIGN)
        buckets = cut(entries, min(most, several))
        if len(buckets) < 4:
            return 1.0, self._run(buckets, 1.0, record, None)
        each = min(_SAMPLE + 1, len(buckets) // 2)
        timings: list[Timings] = []
        for number, share in enumerate((1.0, 0.0)):
            few = buckets[number * each : (number + 1) * each]
            for part in (few[:1], few[1:]):  # the first pays for what is made once
                trial = Record(record.engine)
                try:
                    self._run(part, share, trial, None)
                    timing = trial.timings()
                finally:
                    record.include(trial)
            timings.append(timing)
        share = best_share(*timings, self._slots, both)
        return share, self._run(buckets[2 * each :], share, record, None)

    def _run(self, buckets: list[Bucket], share: float, record: Record, early: EarlyGradients | None) -> Job | None:
        if not buckets:
            return None
        order = list(interleave(buckets, share))
        device, host = ([bucket for bucket, there in order if there is which] for which in (True, False))
        lanes: dict[bool, AcceleratorLane | HostLane] = {}
        if device:
            rows = max(self._rows(bucket) for bucket in device)
            elements = max(bucket.numel for bucket in device)
            lanes[True] = AcceleratorLane(record, elements, min(self._slots, len(device)), rows)
        if host:
            elements = max(bucket.numel for bucket in host)
            lanes[False] = HostLane(record, elements, min(self._slots, len(host)), self._staging, early)
        for bucket, there in order:
            if lanes[there].full:
                lanes[there].end()
            lanes[there].start(bucket)
        for lane in lanes.values():  # the accelerator's first, which does not wait
            lane.flush()
        last = record.engine.run(lambda: None)
        for lane in lanes.values():
            lane.release()
        return last

    @staticmethod
    def _rows(bucket: Bucket) -> int:
        cast = any(piece.entry.grad_dtype != torch.float32 for piece in bucket.pieces)
        return len(bucket.arena.kinds) + cast
