"""`Plan`: what was predicted, as numbers and in words."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hf_longmoe.config import LongMoEConfig
from hf_longmoe.planner.caps import MOST, NOTHING
from hf_longmoe.planner.predict import Prediction
from hf_longmoe.planner.shape import Layout, ModelShape

__all__ = ["ASSUMED", "NOT_COUNTED", "STEP", "Plan"]

STEP = 256  # tokens between two lengths that are told apart

ASSUMED = (
    "FSDP2 holds two layers' whole weights at a time, and in backward one layer's whole gradient twice (as computed,"
    " and in the order in which it is summed); experts are gathered over the ranks beyond ep_size only.",
    "The attention kernel is a fused one: it keeps no matrix of scores.",
    "Experts get equal numbers of rows; under ep_size, the fullest rank gets imbalance times the mean.",
)
NOT_COUNTED = (
    "the device's context and libraries, fragments of its allocator, buffers of the communication library, scratch of"
    " kernels (headroom is left for these)",
    "what sequence-parallel attention exchanges",
    "anything the training script keeps itself, such as evaluation logits",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """
    Arguments:
        shape, layout: what was planned.
        config: the caps.
        limit: bytes of a device that may be used; `None` if no device memory was given.
        unbounded, scheduled: the peaks of one rank, stock and with `config`.
        at_most: the scheduled total whatever the routing.
        longest_unbounded, longest_scheduled: tokens of the longest sequence within `limit`; `None` if none is.
        planner: what it was made by, for other lengths and for `verify`.
    """

    shape: ModelShape
    layout: Layout
    config: LongMoEConfig
    limit: int | None
    unbounded: Prediction
    scheduled: Prediction
    at_most: int
    longest_unbounded: int | None
    longest_scheduled: int | None
    planner: Any = field(repr=False, compare=False)

    def at(self, length: int) -> tuple[Prediction, Prediction]:
        """Unbounded and scheduled (at most) at another sequence length."""
        return self.planner.both(length, self.config)

    @property
    def fits(self) -> bool | None:
        """Whether the scheduled step fits, whatever the routing; `None` if no device memory was given."""
        return None if self.limit is None else self.at_most <= self.limit

    @property
    def config_is_empty(self) -> bool:
        """Whether no schedule is on."""
        return self.config == NOTHING

    def dies_first(self, scheduled: bool = False) -> tuple[str, int] | None:
        """
        The component that holds most at the shortest sequence that does not fit, and that length; `None` if no device
        memory was given, or any sequence of up to `caps.MOST` tokens fits.
        """
        if self.limit is None:
            return None
        fits = self.longest_scheduled if scheduled else self.longest_unbounded
        unit = max(STEP, self.layout.cp_size)
        length = (fits or 0) + unit
        if length > MOST:
            return None
        return self.at(length)[scheduled].largest, length

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in `hf-longmoe plan --json`; sizes in bytes."""
        dies = self.dies_first()
        return {
            "format": "hf-longmoe plan",
            "version": 1,
            "unit": "bytes",
            "model_type": self.shape.model_type,
            "parameters": self.shape.parameters,
            "layout": dataclasses.asdict(self.layout),
            "limit": self.limit,
            "config": self.config.to_dict(),
            "unbounded": dataclasses.asdict(self.unbounded),
            "scheduled": dataclasses.asdict(self.scheduled),
            "scheduled_at_most": self.at_most,
            "fits": self.fits,
            "longest_unbounded": self.longest_unbounded,
            "longest_scheduled": self.longest_scheduled,
            "dies_first": None if dies is None else {"component": dies[0], "seq_len": dies[1]},
            "assumed": list(ASSUMED),
            "not_counted": list(NOT_COUNTED),
        }
