"""Which share of the elements the accelerator updates, from the timings of a few buckets updated in each way."""

from __future__ import annotations

import torch

from hf_longmoe.schedules.optimizer.record import STAGES, Timings

__all__ = ["agree", "best_share", "step_seconds"]

_PARTS = 32  # shares that are looked at
_WORTH = 0.9  # both at once must take at most this much of the better one's time


def step_seconds(share: float, device: Timings, host: Timings, slots: int) -> float:
    """
    Seconds an element when the accelerator updates `share` of them.

    The links and the accelerator serve both ways; each is as slow as its busiest stage, and as the time that a bucket
    holds one of the `slots`.
    """
    ways = ((share, device, device.elements["accelerator"]), (1 - share, host, host.elements["host"]))
    loads = [sum(part * way.seconds[stage] / max(elements, 1) for part, way, elements in ways) for stage in STAGES]
    chains = [part * way.serial / max(elements, 1) / slots for part, way, elements in ways]
    return max(*loads, *chains)


def best_share(device: Timings, host: Timings, slots: int, both: bool) -> float:
    """
    0.0: the host alone; 1.0: the accelerator alone.

    Arguments:
        device, host: of buckets that went one way only.
        both: whether each is to have a part whatever it brings.
    """
    shares = [part / _PARTS for part in range(_PARTS + 1)]
    mixed = min(shares[1:-1], key=lambda share: step_seconds(share, device, host, slots))
    single = min((1.0, 0.0), key=lambda share: step_seconds(share, device, host, slots))
    gain = step_seconds(mixed, device, host, slots) <= _WORTH * step_seconds(single, device, host, slots)
    return mixed if both or gain else single


def agree(share: float) -> float:
    """Rank 0's, on all ranks of a launch: a collective of the default group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        decided = [share]
        torch.distributed.broadcast_object_list(decided, src=0)
        share = decided[0]
    return share
