"""SIGTERM before the walltime: the step is finished, a checkpoint saved, and all ranks end together."""

from __future__ import annotations

import signal
from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["StopOnSigterm"]


class StopOnSigterm(TrainerCallback):
    """
    What `TrainingArguments(enable_jit_checkpoint=True)` asks for, where several ranks write one checkpoint.

    A SIGTERM to any of the ranks counts for all: at the end of each step they agree, by one number, whether to save
    and stop. Transformers' own callback has each rank decide alone, three seconds after its signal. More signals
    change nothing; a launcher may pass on what the ranks have had already.

    Attributes:
        stopped (`bool`): whether the last training was ended by it.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._asked = False
        self._before: Any = None

    def install(self) -> None:
        """From here on SIGTERM waits for the end of a step. In the main thread alone can Python do that."""
        self.stopped = self._asked = False
        self._before = signal.signal(signal.SIGTERM, self._ask)

    def remove(self) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _ask(self, *_: Any) -> None:
        self._asked = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        asked = torch.tensor(float(self._asked), device=args.device)
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(asked, distributed.ReduceOp.MAX)
        if asked.item():
            self.stopped = True
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
