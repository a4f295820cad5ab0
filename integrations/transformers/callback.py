"""`ComponentPeakCallback`: the peaks of a Trainer's steps, in its trackers, in a table, in JSON and in a PNG."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import weakref
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import distributed
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from hf_longmoe.integrations.transformers.causal_lm import causal_lm
from hf_longmoe.integrations.transformers.regions import watch
from hf_longmoe.integrations.transformers.traffic import (
    LayerTraffic,
    Traffic,
    as_json,
    log_entries,
    over_ranks,
    summary,
)
from hf_longmoe.peaks import PeakReport, StorageProbe, save_reports
from hf_longmoe.peaks.allocator import AllocatorProbe, has_allocator
from hf_longmoe.peaks.plot import plot_reports
from hf_longmoe.peaks.report import merge_ranks
from hf_longmoe.peaks.table import print_reports, shown_components
from hf_longmoe.planner import Plan
from hf_longmoe.planner.table import print_comparison
from hf_longmoe.sizes import format_bytes

__all__ = ["ComponentPeakCallback", "over_all_ranks"]

logger = logging.get_logger(__name__)


class ComponentPeakCallback(TrainerCallback):
    """
    Measures the peak memory of training steps by component and reports the maximum over ranks.

    On an accelerator every step is measured, from the allocator; on CPU one step in `every`, from the storages, since
    that costs about 90 microseconds an operator. Peaks go to the Trainer's trackers and `log_history` as
    `peak/<component>_MiB`; after training `report` holds the highest, the main process prints them as a table and
    writes `peaks.json`, and `peaks.png` where matplotlib is installed. For a model that `patch_model` has patched it
    also names the component nearest its cap, and warns once when one passes its cap. DDP's own gradient buckets,
    allocated before, are not seen on CPU.

    Of experts on the pipelined schedule it logs `experts/...`: waves, largest rows received and sent, imbalance, lent
    weights; `experts.json` has them by step and layer.

    Arguments:
        every (`int`, defaults to 10): log (on CPU: measure) one step in so many.
        first (`int`, defaults to 3):
            The first step of the run to log; the last one of a shorter run. The optimizer has no state before step 2,
            and DDP allocates its final buckets in it.
        output_dir (`str`, *optional*): folder for the files; the Trainer's `output_dir` by default.
        plan (`Plan`, *optional*): what was predicted for this run: after training each measured peak is printed
            beside its prediction, and those that are off are named.

    Raises:
        `ValueError`: `every` or `first` is below 1, or `plan` is no `Plan`.
    """

    report: PeakReport | None = None
    """The highest peaks of the last training run, over its measured steps and all ranks."""

    def __init__(
        self,
        every: int = 10,
        first: int = 3,
        output_dir: str | os.PathLike | None = None,
        plan: Plan | None = None,
    ):
        for name, value in (("every", every), ("first", first)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of steps, 1 or more.")
        if plan is not None and not isinstance(plan, Plan):
            raise ValueError(f"plan={plan!r} must be a Plan, as hf_longmoe.plan returns it.")
        self.every, self.first, self.output_dir, self.plan = every, first, output_dir, plan
        self._trainer: Callable[[], Trainer | None] = lambda: None
        self._disarm: Callable[[], None] = lambda: None
        self._open = contextlib.ExitStack()
        self._probe: StorageProbe | AllocatorProbe | None = None
        self._pending: list[PeakReport] = []
        self._steps: dict[int, dict[str, LayerTraffic]] = {}

    # -- events ------------------------------------------------------------------------------------------------------
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        self._close()
        self._disarm()  # still armed where another callback's on_epoch_begin raised
        self.report, self._pending, self._warned, self._steps = None, [], set(), {}
        self._start, self._first = state.global_step, min(self.first, max(1, state.max_steps - state.global_step))
        trainer = _calling_trainer(self)
        if trainer is None:
            logger.warning("ComponentPeakCallback works inside transformers.Trainer only: nothing is measured.")
            self._trainer = lambda: None
        else:
            self._trainer = weakref.ref(trainer)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        trainer = self._trainer()
        if trainer is not None:
            self._disarm = _call_after(trainer, "_run_epoch", self._close)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        self._close()
        trainer = self._trainer()
        if trainer is None:
            return
        allocator = has_allocator(args.device)
        if allocator or self._is_due(state.global_step + 1):
            self._probe = AllocatorProbe(device=args.device) if allocator else StorageProbe(args.device)
            self._open.enter_context(self._probe)
            self._watch = self._open.enter_context(watch(trainer.model, trainer.optimizer))
            self._traffic = self._open.enter_context(Traffic(trainer.model))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        if self._probe is None:
            return control
        probe = self._probe
        self._close()
        self._pending.append(probe.report())
        trainer = self._trainer()
        if not self._is_due(state.global_step):
            return control
        report = self._gather(args)
        self._check_caps(report, trainer, state)
        logs = {f"peak/{name}_MiB": _mib(report.components[name].peak) for name in shown_components(report)}
        self._steps[state.global_step] = over_ranks(self._traffic.layers, args.device)
        logs |= {"peak/total_MiB": _mib(report.total), **log_entries(self._steps[state.global_step])}
        return _log(trainer, logs, control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        self._close()
        trainer = self._trainer()
        if self._pending:
            self._check_caps(self._gather(args), trainer, state)
        if self.report is None or not state.is_world_process_zero:
            return
        caps, beside = _caps(trainer), self._watch.beside_caps
        print()
        print_reports({"this run": self.report}, caps=caps)
        if caps:
            nearest = max(caps, key=lambda name: self.report.components[name].working / (caps[name] + beside[name]))
            working = format_bytes(self.report.components[nearest].working)
            cap = f"{format_bytes(caps[nearest])} and {format_bytes(beside[nearest])} that it leaves aside"
            print(f"Nearest its cap: {nearest}, {working} of {cap}.")
        if self.plan is not None:
            print_comparison(self.plan.scheduled if caps else self.plan.unbounded, self.report)
        folder = args.output_dir if self.output_dir is None else self.output_dir
        os.makedirs(folder, exist_ok=True)
        if any(self._steps.values()):
            print(summary(self._steps.values()))
            with open(os.path.join(folder, "experts.json"), "w", encoding="utf-8") as file:
                json.dump({str(step): as_json(layers) for step, layers in self._steps.items()}, file, indent=1)
        save_reports(os.path.join(folder, "peaks.json"), {"this run": self.report})
        try:
            plot_reports(os.path.join(folder, "peaks.png"), {"this run": self.report})
        except ImportError as error:
            logger.warning(f"peaks.png is not written. {error}")

    # -- the rest ----------------------------------------------------------------------------------------------------
    def _is_due(self, step: int) -> bool:
        """Whether to log `step` (1, 2, ...); counted from where this run started or resumed."""
        after_first = step - self._start - self._first
        return after_first >= 0 and after_first % self.every == 0

    def _close(self) -> None:
        self._probe = None
        self._open.close()

    def _gather(self, args: TrainingArguments) -> PeakReport:
        """What has been measured since the last time, over all ranks. Every rank must come here."""
        report = over_all_ranks(reduce(PeakReport.merge, self._pending), args.device)
        self._pending = []
        self.report = report if self.report is None else self.report.merge(report)
        return report

    def _check_caps(self, report: PeakReport, trainer: Trainer, state: TrainerState) -> None:
        for name, cap in _caps(trainer).items():
            working = report.components[name].working
            if working > cap + self._watch.beside_caps[name] and name not in self._warned:
                self._warned.add(name)
                if state.is_world_process_zero:
                    logger.warning(
                        f"{name} has passed its cap: {format_bytes(working)} at once, {name}.budget is"
                        f" {format_bytes(cap)} (step {state.global_step}). `print(model.longmoe)` shows what was left"
                        " alone."
                    )


def over_all_ranks(report: PeakReport, device: torch.device) -> PeakReport:
    """The same of all ranks, which must all come here."""
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return report
    # All the rows and not their maximum: the components at the peak must be those of one rank, or they would not sum
    # to the total. A row is half a kilobyte.
    row = torch.tensor(report.to_row(), dtype=torch.int64, device=device)
    rows = [torch.empty_like(row) for _ in range(distributed.get_world_size())]
    distributed.all_gather(rows, row)
    return merge_ranks(PeakReport.from_row(row.tolist(), report.probe) for row in rows)


def _calling_trainer(callback: TrainerCallback) -> Trainer | None:
    """
    The Trainer whose event is being handled. A callback is not handed it, and only `Trainer.log` reaches trackers and
    `log_history` (what `on_log` adds to its `logs` reaches neither, depending on the order of callbacks).

    Every event is called from a method of the Trainer, so it is the nearest `self` up the stack that is one; and it
    must know this callback. Nothing else needs to be replaced, and subclasses work. Done once, in `on_train_begin`:
    reading a frame's locals can keep them alive until the frame ends, which in a step would change what is measured.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and any(known is callback for known in owner.callback_handler.callbacks):
            return owner
        frame = frame.f_back
    return None


def _call_after(owner: Any, name: str, then: Callable[[], None]) -> Callable[[], None]:
    """
    Calls `then` when the next call of `owner.name` ends, also by an exception: the Trainer has no event for that, and
    a probe must not outlive its step. The method itself is back in place as soon as that call begins.

    Returns:
        What takes the arrangement back if no call comes.
    """
    before = vars(owner).get(name)
    method = getattr(owner, name)

    def once(*args: Any, **kwargs: Any) -> Any:
        restore()
        try:
            return method(*args, **kwargs)
        finally:
            then()

    def restore() -> None:
        if vars(owner).get(name) is once:
            delattr(owner, name) if before is None else setattr(owner, name, before)

    setattr(owner, name, once)
    return restore


def _log(trainer: Trainer, logs: dict[str, float], control: TrainerControl) -> TrainerControl:
    # Logging clears `should_log`, which may stand for the loss of this very step: that is logged after this event.
    should_log = control.should_log
    trainer.log(logs)
    trainer.control.should_log = should_log
    return trainer.control


def _caps(trainer: Trainer) -> dict[str, int]:
    patch = getattr(causal_lm(trainer.model), "longmoe", None)
    parts = {} if patch is None else {"dispatch": patch.config.dispatch, "vocab": patch.config.vocab}
    return {name: part.budget for name, part in parts.items() if part is not None}


def _mib(nbytes: int) -> float:
    return round(nbytes / 2**20, 3)
