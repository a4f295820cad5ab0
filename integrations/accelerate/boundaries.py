"""SCO on a Transformers model: its checkpointed layers' inputs wait for backward in host memory."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longmoe.config import BoundariesConfig
from hf_longmoe.integrations.transformers.checkpoint_function import (
    check_exclusive,
    checkpointing_of,
    wrap_checkpointing,
)
from hf_longmoe.peaks.region import tag
from hf_longmoe.schedules.boundaries import BoundaryOffload
from hf_longmoe.schedules.host import Engine

__all__ = ["Installed", "check_boundaries", "install_boundaries"]


class Installed:
    """
    SCO on one model, which it does not keep alive. `remove()` restores the model's checkpointing and frees the host
    memory.
    """

    def __init__(self, model: PreTrainedModel, offload: BoundaryOffload | None) -> None:
        self.model, self._handle = weakref.ref(model), None
        if offload is not None:
            # Of the base model: PEFT calls the outer one's `forward`, and not the model.
            self._handle = model.base_model.register_forward_pre_hook(partial(_begin, offload))

    @property
    def offload(self) -> BoundaryOffload | None:
        model = self.model()
        return None if model is None else checkpointing_of(model).offload

    def refresh(self) -> None:
        """After layers were wrapped for checkpointing."""
        wrap_checkpointing(self.model(), checkpointing_of(self.model()))

    def remove(self) -> None:
        model, offload = self.model(), self.offload
        if model is not None:
            settings = checkpointing_of(model)
            settings.offload, settings.exclusive = None, False
            wrap_checkpointing(model, settings)
        if offload is not None:
            self._handle.remove()
            offload.close()


def _begin(offload: BoundaryOffload, base_model: nn.Module, _: Any) -> None:
    known = offload.offloaded + offload.left
    offload.begin(None if known else sum(map(_checkpoints, base_model.modules())))


def _checkpoints(module: nn.Module) -> bool:
    layer = isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing and module.training
    return layer or isinstance(module, CheckpointWrapper)


def check_boundaries(model: PreTrainedModel, installed: Installed | None) -> None:
    """
    Arguments:
        installed: what this Accelerator's plugin has on the model already.

    Raises:
        `ValueError`: as `install_boundaries`; nothing is changed here.
    """
    if installed is None and checkpointing_of(model).exclusive:
        raise ValueError("This model's boundaries are offloaded already, by the LongMoEPlugin of another Accelerator.")
    check_exclusive(model)


def install_boundaries(model: PreTrainedModel, caps: BoundariesConfig, engine: Engine | None) -> Installed:
    """
    Has the inputs of checkpointed layers offloaded, whenever checkpointing is on.

    Arguments:
        model: its layers may be wrapped, sharded, patched.
        caps: host budget and depth.
        engine: does the copies; `None`: the model's memory is the host's, and nothing is copied.

    Raises:
        `ValueError`: activations are offloaded already, or the model's checkpointing is of an old format.
    """
    check_boundaries(model, None)
    settings, offload = checkpointing_of(model), None
    if engine is not None:
        restored = partial(tag, "boundaries")
        offload = BoundaryOffload(engine, host_budget=caps.host_budget, depth=caps.depth, restored=restored)
    settings.offload, settings.exclusive = offload, True
    wrap_checkpointing(model, settings)
    return Installed(model, offload)
