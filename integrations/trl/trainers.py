"""TRL's trainers with the schedules: `LongMoESFTTrainer`, `LongMoEDPOTrainer`, and the mixin for the others."""

from __future__ import annotations

from typing import Any

from transformers import Trainer
from trl import DPOTrainer, SFTTrainer

from hf_longmoe.integrations.transformers.trainer import LongMoETrainerMixin
from hf_longmoe.integrations.trl.head import bound_head

__all__ = ["LongMoEDPOTrainer", "LongMoESFTTrainer", "LongMoETRLMixin"]


class LongMoETRLMixin(LongMoETrainerMixin):
    """
    For a trainer of TRL: `class MyTrainer(LongMoETRLMixin, GRPOTrainer)`. Its model, which `patch_model` has patched,
    gives TRL the log-probabilities, entropy and accuracy that it asks for in the memory of one tile of logits; so does
    its reference model. Checkpoints are those of `LongMoETrainerMixin`.

    Raises:
        `ValueError`: as `bound_head`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        bound_head(self)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the trainer's. Peaks go past it: it adds, and so uses up, what the log of the step itself is to have."""
        if any(name.startswith("peak/") for name in logs):
            Trainer.log(self, logs, start_time)
        else:
            super().log(logs, start_time)


class LongMoESFTTrainer(LongMoETRLMixin, SFTTrainer):
    """`trl.SFTTrainer`, and what `LongMoETRLMixin` adds."""


class LongMoEDPOTrainer(LongMoETRLMixin, DPOTrainer):
    """`trl.DPOTrainer`, and what `LongMoETRLMixin` adds."""
