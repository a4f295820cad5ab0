"""What a rank's company and the four schedules change of the bytes that one rank alone would take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_longmoe.config import LongMoEConfig
from hf_longmoe.peaks.ledger import OWN, Moment
from hf_longmoe.planner.closed_forms import Resident, boundaries_held
from hf_longmoe.planner.predict import STEP, Change

__all__ = ["Together", "host_bytes", "scheduled", "step_moment", "unbounded"]

_BACKWARD = ("recompute", "backward")


@dataclass(frozen=True, kw_only=True)
class Together:
    """
    What every way of running has.

    Arguments:
        resident: see `closed_forms.resident`.
        itemsize: bytes of an element in the counts.
        exchange: of expert parallelism without a schedule, bytes beside the counted ones while `dispatch` is at work.
        tied: the head is the embedding, and so gathered all through the step.
    """

    resident: Resident
    itemsize: int
    exchange: int
    tied: bool

    def kept(self, key: tuple[str, str], name: str, level: int, *, ring: bool) -> int:
        """Parameters, gradients and optimizer state: divided, and gathered again where they are at work."""
        own, counted = self.resident, self.resident.counted * self.itemsize
        if name == "optimizer":
            return level * own.moments // (2 * counted)
        share = own.parameters if name == "parameters" else own.gradients
        return level * share // counted + self._gathered(key, name, ring)

    def _gathered(self, key: tuple[str, str], name: str, ring: bool) -> int:
        phase, at_work = key
        if phase not in ("forward", *_BACKWARD):
            return 0
        layer, head = self.resident.gathered_layer, self.resident.gathered_head
        at_head = at_work == "vocab"
        head = head if self.tied or (at_head and not ring) else 0
        if name == "parameters":  # the layer at work, and the next one on its way
            return head + (0 if at_head else 2 * layer)
        # A whole gradient, and its copy in the order in which it is summed over the ranks.
        return 2 * (head if at_head else layer) if phase in _BACKWARD else 0


def unbounded(together: Together) -> Change:
    """Nothing is capped."""

    def change(key: tuple[str, str], name: str, level: int) -> int:
        if name in ("parameters", "gradients", "optimizer"):
            return together.kept(key, name, level, ring=False)
        if name == "dispatch" and key[1] == "dispatch":
            return level + together.exchange
        return level

    return change


def scheduled(
    together: Together,
    caps: LongMoEConfig,
    extra: Mapping[str, Mapping[str, int]],
    moments: Mapping[tuple[str, str], Moment],
    *,
    boundary: int,
    count: int,
    ring: bool,
) -> Change:
    """
    Arguments:
        caps: a part that is `None` is not scheduled.
        extra: by what is at work (`dispatch`, a part of it, `vocab`) and phase: bytes of that component beside the
            counted ones, where the schedule runs (`peaks.ledger.OWN`): more than that is what it found.
        moments: that are changed.
        boundary, count: bytes of one boundary; how many there are.
        ring: whether the head stays divided.
    """
    held = 0 if caps.boundaries is None else boundaries_held(caps.boundaries.host_budget, boundary, count)
    on_device = count if not held else min(count, count - held + caps.boundaries.depth + 2)

    def change(key: tuple[str, str], name: str, level: int) -> int:
        if caps.optimizer is not None and key == STEP:  # see `step_moment`
            return level
        if name == "optimizer" and caps.optimizer is not None:
            return 0
        if name in ("parameters", "gradients", "optimizer"):
            return together.kept(key, name, level, ring=ring)
        if name == "boundaries":
            return min(level, on_device * boundary)
        phase, at_work = key
        if name == at_work == "dispatch" and caps.dispatch is None:
            return level + together.exchange
        if at_work in extra and at_work.partition(",")[0] == name:
            more, own = extra[at_work].get(phase, 0), moments[key].levels.get(OWN, {}).get(name, level)
            return max(0, level + more) if level <= own else max(level, own + more)
        return level

    return change


def step_moment(together: Together, caps: LongMoEConfig) -> dict[tuple[str, str], Moment]:
    """The step of an offloaded optimizer: weights, gradients, and the staging of its buckets."""
    if caps.optimizer is None:
        return {}
    levels = {
        "parameters": together.resident.parameters,
        "gradients": together.resident.gradients,
        "optimizer": min(caps.optimizer.slots * caps.optimizer.bucket, 16 * together.resident.elements),
    }
    return {STEP: Moment(levels, {"optimizer": levels})}


def host_bytes(together: Together, caps: LongMoEConfig, boundary: int, count: int) -> dict[str, int]:
    """Host memory of a rank: boundaries, and both moments with float32 masters of parameters in half precision."""
    found = {}
    if caps.boundaries is not None and count:
        found["boundaries"] = boundary * boundaries_held(caps.boundaries.host_budget, boundary, count)
    if caps.optimizer is not None:
        own = together.resident
        found["optimizer"] = own.elements * (8 if own.parameters == 4 * own.elements else 12)
    return found
