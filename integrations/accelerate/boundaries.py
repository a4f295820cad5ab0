"""SCO on a Transformers model: its checkpointed layers' inputs wait for backward in host memory."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longmoe.config import BoundariesConfig
from hf_longmoe.integrations.transformers.checkpoint_function import checkpointing_of, wrap_checkpointing
from hf_longmoe.peaks.region import tag
from hf_longmoe.schedules.boundaries import BoundaryOffload
from hf_longmoe.schedules.host import Engine

__all__ = ["Installed", "install_boundaries"]


class Installed:
    """SCO on one model. `remove()` restores the model's checkpointing and frees the host memory."""

    def __init__(self, model: PreTrainedModel, offload: BoundaryOffload | None) -> None:
        self.model, self.offload = model, offload
        self._handle = None
        if offload is not None:
            # Of the base model: PEFT calls the outer one's `forward`, and not the model.
            self._handle = model.base_model.register_forward_pre_hook(self._begin)

    def _begin(self, *_: Any) -> None:
        known = self.offload.offloaded + self.offload.left
        self.offload.begin(None if known else sum(map(_checkpoints, self.model.modules())))

    def refresh(self) -> None:
        """After layers were wrapped for checkpointing."""
        wrap_checkpointing(self.model, checkpointing_of(self.model))

    def remove(self) -> None:
        settings = checkpointing_of(self.model)
        settings.offload, settings.exclusive = None, False
        wrap_checkpointing(self.model, settings)
        if self.offload is not None:
            self._handle.remove()
            self.offload.close()


def _checkpoints(module: nn.Module) -> bool:
    layer = isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing and module.training
    return layer or isinstance(module, CheckpointWrapper)


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
    settings = checkpointing_of(model)
    if settings.exclusive:
        raise ValueError("This model's boundaries are offloaded already, by the LongMoEPlugin of another Accelerator.")
    offload = None
    if engine is not None:
        restored = partial(tag, "boundaries")
        offload = BoundaryOffload(engine, host_budget=caps.host_budget, depth=caps.depth, restored=restored)
    settings.offload, settings.exclusive = offload, True
    try:
        wrap_checkpointing(model, settings)
    except ValueError:
        settings.offload, settings.exclusive = None, False
        raise
    return Installed(model, offload)
