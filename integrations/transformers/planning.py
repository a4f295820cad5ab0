"""`plan`: which peak dies first, the caps that keep a budget, and what a fake step says of both."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

from transformers import PreTrainedConfig

from hf_longmoe.config import LongMoEConfig
from hf_longmoe.integrations.transformers.counting import Lengths, count, lengths_for, small_caps
from hf_longmoe.integrations.transformers.fake_step import two_depths
from hf_longmoe.integrations.transformers.planning_shape import shape_of
from hf_longmoe.integrations.transformers.schedules_alone import SchedulesAlone
from hf_longmoe.names import nearest_hint
from hf_longmoe.planner.caps import NOTHING, choose, longest
from hf_longmoe.planner.changes import Together, host_bytes, scheduled, step_moment, unbounded
from hf_longmoe.planner.closed_forms import exchange_bytes, received_rows, resident
from hf_longmoe.planner.counts import Counts
from hf_longmoe.planner.plan import STEP, Plan
from hf_longmoe.planner.predict import Prediction, predict
from hf_longmoe.planner.shape import Layout, ModelShape
from hf_longmoe.planner.verification import Verification, compare
from hf_longmoe.sizes import TooSmall, format_bytes, format_tokens, parse_bytes, parse_tokens

__all__ = ["DoesNotFit", "Planner", "caps_for", "plan"]


class DoesNotFit(ValueError):
    """Every schedule and the smallest caps are not enough."""


def plan(
    config: PreTrainedConfig,
    layout: Layout,
    device_memory: int | str | None = None,
    *,
    headroom: float = 0.08,
    caps: LongMoEConfig | None = None,
) -> Plan:
    """
    Predicts the peaks of a training step on each rank, unbounded and scheduled, from a config alone.

    Arguments:
        config: of a causal LM. No weights are loaded, nothing is downloaded.
        layout: how the step is spread over the ranks.
        device_memory (`int` or `str`, *optional*): of one device, e.g. `"80GiB"`; without it, nothing is said of what
            fits, and `caps` are the defaults.
        headroom (`float`, defaults to 0.08): share of it that is left for what is not counted: the context of the
            device, its libraries, an allocator's fragments.
        caps (`LongMoEConfig`, *optional*): chosen to fit if not given.

    Raises:
        `ValueError`: the config is of no causal LM or lacks something, or the layout does not fit it.
        `DoesNotFit` (a `ValueError`): nothing makes it fit in `device_memory`; the message says by how much, and what
            would.
    """
    planner = Planner(config, layout)
    limit = None
    if device_memory is not None:
        limit = int(parse_bytes(device_memory, "device_memory") * (1 - headroom))
    chosen = caps
    if chosen is None and limit is None:
        chosen = planner.without_absent(LongMoEConfig())
    if chosen is None:
        chosen, total = planner.choose(limit)
        if total > limit:
            raise DoesNotFit(_refusal(planner, limit, chosen))
    return Plan(
        shape=planner.shape,
        layout=layout,
        config=chosen,
        limit=limit,
        unbounded=planner.unbounded(),
        scheduled=planner.scheduled(chosen),
        at_most=planner.at_most(chosen),
        longest_unbounded=None if limit is None else planner.longest(limit),
        longest_scheduled=None if limit is None else planner.longest(limit, chosen),
        planner=planner,
    )


def caps_for(
    config: PreTrainedConfig, seq_len: int | str | None, device_memory: int | str, layout: dict[str, Any]
) -> LongMoEConfig:
    """`LongMoEConfig.for_budget`."""
    known = [field.name for field in dataclasses.fields(Layout)]
    for name in layout:
        if name not in known:
            raise ValueError(
                f"for_budget has no argument {name!r}.{nearest_hint(name, known)} Known: {', '.join(known)}."
            )
    if seq_len is None:
        seq_len = getattr(config.get_text_config(), "max_position_embeddings", None)
        if seq_len is None:
            raise ValueError("seq_len is not given, and the config has no max_position_embeddings.")
    return plan(config, Layout(seq_len=parse_tokens(seq_len), **layout), device_memory).config


class Planner:
    """
    What is counted once for a config, and then serves any length and any caps.

    Arguments:
        config: of a causal LM.
        layout: of the step.
    """

    def __init__(self, config: PreTrainedConfig, layout: Layout) -> None:
        self.shape: ModelShape = shape_of(config)
        layout.check(self.shape)
        self.config, self.layout = config, layout
        self._kept: dict[tuple[bool, bool], tuple[LongMoEConfig, Counts]] = {}

    @cached_property
    def _stock(self) -> Counts:
        return count(self.config, self.layout, lengths=self._lengths)

    @cached_property
    def _lengths(self) -> Lengths:
        return lengths_for(self.config, self.layout)

    @property
    def depths(self) -> tuple[int, ...]:
        """Layers of the models that are counted: one or two."""
        return self._stock.depths

    @cached_property
    def _alone(self) -> SchedulesAlone:
        return SchedulesAlone(self.config, self.layout, self.shape)

    def without_absent(self, caps: LongMoEConfig) -> LongMoEConfig:
        """`caps` without those of what the model or the layout has not: dispatch of a dense model, boundaries."""
        parts: dict[str, Any] = {}
        if not self.shape.experts:
            parts["dispatch"] = None
        if self.layout.checkpointing == "off":
            parts["boundaries"] = None
        return dataclasses.replace(caps, **parts)

    def unbounded(self, layout: Layout | None = None, *, alone: bool = False) -> Prediction:
        """
        The stock model.

        Arguments:
            layout: of the planner's, another number of tokens, sequences or ranks; the same `ep_size`.
            alone: as a fake step has it, see `fake_step`: nothing divided, gathered or exchanged.
        """
        layout = layout or self.layout
        return predict(self._at(self._stock, layout), unbounded(self._together(layout, alone)))

    def scheduled(
        self, caps: LongMoEConfig, layout: Layout | None = None, *, alone: bool = False, most: bool = False
    ) -> Prediction:
        """
        The patched model.

        Arguments:
            caps: of all parts.
            layout, alone: see `unbounded`.
            most: the bytes that a schedule takes at most, whatever the routing, not those of balanced routing.

        Raises:
            `ValueError`: a cap is too small.
        """
        layout, caps = layout or self.layout, self.without_absent(caps)
        if caps.dispatch is None and caps.vocab is None:
            moments, extra = self._at(self._stock, layout), {}
        else:
            small, counts = self._counts(caps.dispatch is not None, caps.vocab is not None)
            moments = self._at(counts, layout)
            extra = self._alone.extra(layout, caps, small, counts.lengths[0], alone=alone, most=most)
        together = self._together(layout, alone)
        boundaries = max(moment.highs.get("boundaries", 0) for moment in moments.values())
        depth = self.shape.depth
        change = scheduled(
            together,
            caps,
            extra,
            moments,
            boundary=boundaries // depth,
            count=depth,
            ring=self._ring(caps, layout),
        )
        moments |= step_moment(together, caps)
        return predict(moments, change, host_bytes(together, caps, boundaries // depth, depth))

    def at_most(self, caps: LongMoEConfig, layout: Layout | None = None) -> int | None:
        """Bytes of device memory that `caps` keep, whatever the routing; `None` if one is too small for the model."""
        if caps == NOTHING:
            return self.unbounded(layout).total
        try:
            return self.scheduled(caps, layout, most=True).total
        except TooSmall:
            return None

    def choose(self, limit: int, layout: Layout | None = None) -> tuple[LongMoEConfig, int]:
        """Caps whose `at_most` is within `limit` bytes, and that; those that take least if none are."""
        caps, total = choose(lambda caps: self.at_most(caps, layout), limit)
        return self.without_absent(caps), total

    def longest(self, limit: int, caps: LongMoEConfig = NOTHING) -> int | None:
        """The longest sequence (over all ranks that share it) within `limit` bytes; `None` if none is."""

        def total(length: int) -> int:
            found = self.at_most(caps, dataclasses.replace(self.layout, seq_len=length))
            return limit + 1 if found is None else found

        return longest(total, limit, unit=max(STEP, self.layout.cp_size))

    def both(self, length: int, caps: LongMoEConfig) -> tuple[Prediction, Prediction]:
        """Unbounded and scheduled (at most) at another length."""
        layout = dataclasses.replace(self.layout, seq_len=length)
        return self.unbounded(layout), self.scheduled(caps, layout, most=True)

    def verify(self, caps: LongMoEConfig) -> Verification:
        """One rank alone, unbounded and with the dispatch and vocab of `caps`: predicted, and by fake steps."""
        caps = self.without_absent(dataclasses.replace(caps, boundaries=None, optimizer=None))
        ran, report = two_depths(self.config, self.layout, depths=self.depths)
        rows = {"unbounded": compare(self.unbounded(alone=True), report)}
        if caps != NOTHING:
            ran, report = two_depths(self.config, self.layout, patched=caps, depths=self.depths)
            rows["scheduled"] = compare(self.scheduled(caps, alone=True), report)
        return Verification(ran, rows)

    # -- parts -------------------------------------------------------------------------------------------------------
    def _at(self, counts: Counts, layout: Layout) -> dict:
        return counts.at(layout.local_seq_len, layout.micro_batch, layout.cp_size)

    def _counts(self, dispatch: bool, vocab: bool) -> tuple[LongMoEConfig, Counts]:
        key = (dispatch, vocab)
        if key not in self._kept:
            small = small_caps(self.config, self.layout, self._lengths)
            small = dataclasses.replace(
                small, dispatch=small.dispatch if dispatch else None, vocab=small.vocab if vocab else None
            )
            self._kept[key] = (
                small,
                count(
                    self.config,
                    self.layout,
                    small,
                    lengths=self._lengths,
                    bent=self._stock.bent,
                    depths=self.depths,
                ),
            )
        return self._kept[key]

    def _together(self, layout: Layout, alone: bool) -> Together:
        shape = self.shape
        if alone:
            layout = dataclasses.replace(
                layout, world_size=layout.ep_size, fsdp_size=1, cp_size=1, imbalance=1.0, parameter_dtype=layout.dtype
            )
        exchange = 0
        if layout.ep_size > 1 and not alone:
            sent = received_rows(layout.tokens, shape.top_k)
            received = received_rows(layout.tokens, shape.top_k, layout.imbalance)
            exchange = exchange_bytes(sent, received, shape.hidden, layout.itemsize)
            exchange += (received - sent) * self._alone.row_bytes
        return Together(resident=resident(shape, layout), itemsize=layout.itemsize, exchange=exchange, tied=shape.tied)

    def _ring(self, caps: LongMoEConfig, layout: Layout) -> bool:
        return (
            caps.vocab is not None and caps.vocab.schedule != "tiles" and layout.fsdp_size > 1 and not self.shape.tied
        )


def _refusal(planner: Planner, limit: int, caps: LongMoEConfig) -> str:
    """Which component, by how much, and the smallest changes that would do."""
    layout, found = planner.layout, planner.scheduled(caps, most=True)
    divided = layout.fsdp_size == layout.world_size
    would = []
    for times in (2, 4, 8, 16, 32, 64):
        ranks = times * layout.world_size
        for flag, name in (("", None), (f" --cp {times * layout.cp_size}", "cp_size")):
            more = {"world_size": ranks} | ({"fsdp_size": ranks} if divided else {})
            more |= {name: times * layout.cp_size} if name else {}
            try:
                wider = dataclasses.replace(layout, **more)
            except ValueError:
                continue
            total = planner.at_most(caps, wider)
            if total is not None and total <= limit:
                would.append(f"--world-size {ranks}{flag}")
                break
        if would:
            break
    length = planner.longest(limit, caps)
    if length is not None:
        would.append(f"--seq-len {format_tokens(length)}")
    if not would:
        would.append(f"--device-memory {format_bytes(found.total * 1.1).replace(' ', '')}")
    return (
        f"does not fit, with the caps that take least: {found.largest} (the largest,"
        f" {format_bytes(found.at_peak[found.largest])} of {format_bytes(found.total)}) by"
        f" {format_bytes(found.total - limit)} beyond the {format_bytes(limit)} that may be used; fits with"
        f" {' or '.join(would)}."
    )
