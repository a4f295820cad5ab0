"""From a model's moments to one rank's peaks: what is divided, gathered, exchanged or capped is put in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hf_longmoe.peaks.ledger import Moment
from hf_longmoe.peaks.region import COMPONENTS

__all__ = ["Change", "Prediction", "predict"]

STEP = ("update", "optimizer")
# Phase and what is at work, a component, its bytes -> bytes.
Change = Callable[[tuple[str, str], str, int], int]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """
    One rank's peaks in a training step, in bytes.

    Arguments:
        components: of each component of `hf_longmoe.peaks`, the most bytes alive at once.
        total: the most bytes of all alive at once.
        at_peak: each component's bytes then; they sum to `total`.
        phase, at_work: when that is: the phase, and what is at work (`peaks.region.Region.at_work`).
        host: bytes of host memory, by component; empty without offloading.
    """

    components: Mapping[str, int]
    total: int
    at_peak: Mapping[str, int]
    phase: str
    at_work: str
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def largest(self) -> str:
        """The component with most bytes at the peak."""
        return max(self.at_peak, key=lambda name: self.at_peak[name])


def predict(
    moments: Mapping[tuple[str, str], Moment], change: Change, host: Mapping[str, int] | None = None
) -> Prediction:
    """
    Arguments:
        moments: of the model at its real depth and length, as one rank without company would have them.
        change: what each number becomes.
        host: see `Prediction`.
    """
    highs = dict.fromkeys(COMPONENTS, 0)
    best: tuple[int, tuple[str, str], dict[str, int]] | None = None
    for key, moment in moments.items():
        for name, level in moment.highs.items():
            highs[name] = max(highs[name], change(key, name, level))
        for levels in moment.levels.values():
            changed = {name: change(key, name, level) for name, level in levels.items()}
            total = sum(changed.values())
            if best is None or total > best[0]:
                best = total, key, changed
    total, (phase, at_work), levels = best
    at_peak = dict.fromkeys(COMPONENTS, 0) | levels
    return Prediction(
        components=highs, total=total, at_peak=at_peak, phase=phase, at_work=at_work, host=dict(host or {})
    )
