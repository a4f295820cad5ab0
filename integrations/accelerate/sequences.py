"""What `LongMoEPlugin` does where `ParallelismConfig(cp_size=...)` has ranks share sequences."""

from __future__ import annotations

import weakref
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from hf_longmoe.integrations.accelerate.context_parallelism import ContextParallelismConfig
from hf_longmoe.integrations.ringmaster import check_ringmaster

__all__ = ["Sequences"]


class Sequences:
    """
    On one Accelerator, and on each model that it prepares. With `cp_size` 1 it does nothing.

    Raises:
        `ImportError`: axolotl-ringmaster is missing.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._before = accelerator, accelerator.parallelism_config
        self._models: list[weakref.ref[PreTrainedModel]] = []
        self.size = 1 if self._before is None else self._before.cp_size
        if self.size == 1:
            return
        check_ringmaster()
        if not isinstance(self._before, ContextParallelismConfig):
            accelerator.state.parallelism_config = ContextParallelismConfig.of(self._before)

    def check(self, models: list[PreTrainedModel]) -> None:
        """
        Raises:
            `ValueError`: one of them cannot share its sequences over so many ranks.
        """
        if self.size == 1:
            return
        from hf_longmoe.integrations.ringmaster.models import check_shareable  # ringmaster may not be installed

        for model in models:
            if "longmoe_sequences" not in vars(model):
                check_shareable(model, self.size)

    def share(self, models: list[PreTrainedModel], module: nn.Module) -> None:
        """
        Arguments:
            models: those inside of `module`, which Accelerate has prepared.
        """
        if self.size == 1:
            return
        from hf_longmoe.integrations.ringmaster.sequences import SharedSequences

        for model in models:
            if "longmoe_sequences" not in vars(model):
                group = self._accelerator.torch_device_mesh["cp"].get_group()
                SharedSequences(model, group, _entered(module, model))
                self._models.append(weakref.ref(model))

    def remove(self) -> None:
        while self._models:
            model = self._models.pop()()
            if model is not None and "longmoe_sequences" in vars(model):
                model.longmoe_sequences.remove(model)
        if self.size > 1:
            self._accelerator.state.parallelism_config = self._before


def _entered(module: nn.Module, model: PreTrainedModel) -> nn.Module:
    """The module that is called for the model: PEFT's, around it, calls the model's `forward` and not the model."""

    def holds(one: Any) -> bool:
        return type(one).__module__.startswith("peft.") and hasattr(one, "get_base_model")

    return next((one for one in module.modules() if holds(one) and one.get_base_model() is model), model)
