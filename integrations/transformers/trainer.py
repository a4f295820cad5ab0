"""`LongMoETrainer`: a Trainer whose sharded runs share sequences over ranks, and are saved, resumed and published."""

from __future__ import annotations

from transformers import Trainer

from hf_longmoe.integrations.transformers.trainer_cards import TrainerCards
from hf_longmoe.integrations.transformers.trainer_checkpoints import TrainerCheckpoints
from hf_longmoe.integrations.transformers.trainer_sequences import TrainerSequences

__all__ = ["LongMoETrainer", "LongMoETrainerMixin"]


class LongMoETrainerMixin(TrainerCards, TrainerCheckpoints, TrainerSequences):
    """For a subclass of `Trainer` of your own: `class MyTrainer(LongMoETrainerMixin, YourTrainer)`."""


class LongMoETrainer(LongMoETrainerMixin, Trainer):
    """`transformers.Trainer`, and what `LongMoETrainerMixin` adds."""
