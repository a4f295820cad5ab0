"""`LongMoECallback`: the schedules on a LightningModule's model, and its component peaks in Lightning's loggers."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from transformers import PreTrainedModel

from hf_longmoe.config import LongMoEConfig
from hf_longmoe.integrations.lightning.schedules import LongMoESchedules
from hf_longmoe.integrations.transformers.callback import over_all_ranks
from hf_longmoe.integrations.transformers.regions import watch
from hf_longmoe.peaks import PeakReport, StorageProbe, save_reports
from hf_longmoe.peaks.allocator import AllocatorProbe, has_allocator
from hf_longmoe.peaks.table import print_reports, shown_components
from hf_longmoe.schedules.host import Engine

__all__ = ["LongMoECallback"]


class LongMoECallback(Callback):
    """
    Patches the model that a LightningModule holds, has its checkpoint boundaries offloaded, and measures the peak
    memory of training steps by component. All is undone in `teardown`, or when `fit` ends by an exception.

    Of the steps measured (on an accelerator too) the maximum over ranks goes to the Trainer's loggers as
    `peak/<component>_MiB`, whatever `log_every_n_steps` says; after `fit` the highest are printed as a table and
    written to `peaks.json`. The optimizer is the module's own: a `LightningAdamW` from `configure_optimizers` has its
    state in host memory.

    Arguments:
        config (`LongMoEConfig`, *optional*): the caps; a part that is `None` is left as it is.
        every (`int`, defaults to 10): measure one step in so many.
        first (`int`, defaults to 3): the first step to measure; the optimizer has no state before step 2.
        output_dir (`str`, *optional*): folder of `peaks.json`; the Trainer's `default_root_dir` by default.
        engine (`Engine`, *optional*): does the copies; by default the device's own streams.

    Raises:
        `ValueError`: `every` or `first` is below 1. From `fit`: as `patch_model`, the strategy is FSDP1 or
            DeepSpeed, or the module makes its model later than in `__init__`.
    """

    report: PeakReport | None = None
    """The highest peaks of the last `fit`, over its measured steps and all ranks."""

    def __init__(
        self,
        config: LongMoEConfig | None = None,
        *,
        every: int = 10,
        first: int = 3,
        output_dir: str | os.PathLike | None = None,
        engine: Engine | None = None,
    ) -> None:
        for name, value in (("every", every), ("first", first)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of steps, 1 or more.")
        self.schedules = LongMoESchedules(config, engine=engine)
        self.every, self.first, self.output_dir = every, first, output_dir
        self._open = contextlib.ExitStack()
        self._probe: StorageProbe | AllocatorProbe | None = None
        self._step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, (FSDPStrategy, DeepSpeedStrategy)):
            raise ValueError(
                f"LongMoECallback does not run under {type(trainer.strategy).__name__}; use ddp, or a"
                " ModelParallelStrategy (FSDP2)."
            )
        if not any(isinstance(module, PreTrainedModel) for module in pl_module.modules()):
            raise ValueError(
                f"LongMoECallback: {type(pl_module).__name__} holds no Transformers model yet; make it in __init__,"
                " since its own setup and configure_model come after this."
            )
        self.schedules.install(pl_module, trainer.strategy.root_device)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()
        self.schedules.remove()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.report, self._step, self._due = None, trainer.global_step, trainer.global_step + self.first

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._probe is not None or trainer.global_step + 1 < self._due:  # accumulation: the step goes on
            return
        device = trainer.strategy.root_device
        self._probe = AllocatorProbe(device=device) if has_allocator(device) else StorageProbe(device)
        self._step = trainer.global_step
        self._open.enter_context(self._probe)
        optimizers = trainer.optimizers
        self._open.enter_context(watch(pl_module, optimizers[0] if optimizers else None))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._probe is None or trainer.global_step == self._step:
            return
        probe = self._probe
        self._close()
        self._due = trainer.global_step + self.every
        report = over_all_ranks(probe.report(), trainer.strategy.root_device)
        self.report = report if self.report is None else self.report.merge(report)
        peaks = {name: report.components[name].peak for name in shown_components(report)} | {"total": report.total}
        logs = {f"peak/{name}_MiB": round(nbytes / 2**20, 3) for name, nbytes in peaks.items()}
        for logger in pl_module.loggers:
            logger.log_metrics(logs, step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        if self.report is None or not trainer.is_global_zero:
            return
        config = self.schedules.config
        parts = {"dispatch": config.dispatch, "vocab": config.vocab}
        print()
        print_reports(
            {"this run": self.report}, caps={name: part.budget for name, part in parts.items() if part is not None}
        )
        folder = trainer.default_root_dir if self.output_dir is None else self.output_dir
        os.makedirs(folder, exist_ok=True)
        save_reports(os.path.join(folder, "peaks.json"), {"this run": self.report})

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")  # which Lightning then does not call

    def _close(self) -> None:
        self._probe = None
        self._open.close()
