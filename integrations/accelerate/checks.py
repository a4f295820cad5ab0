"""What `LongMoEPlugin` refuses at `install`, and the host memory that the optimizer's state will take."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from hf_longmoe.schedules.optimizer import state_bytes as bytes_of

__all__ = ["check_early_gradients", "check_installable", "state_bytes"]


def check_installable(plugin: Any, accelerator: Accelerator) -> None:
    """
    Raises:
        `ValueError`: `accelerator` is none, has a plugin, or has prepared something; or `plugin` is on another one.
    """
    if not isinstance(accelerator, Accelerator):
        raise ValueError(
            f"accelerator={type(accelerator).__name__} must be an accelerate.Accelerator (of a Trainer:"
            " trainer.accelerator)."
        )
    if "longmoe" in vars(accelerator):
        raise ValueError("This Accelerator has a LongMoEPlugin already; remove() that one first.")
    if plugin._accelerator is not None:
        raise ValueError("This LongMoEPlugin is installed on another Accelerator; remove() it there first.")
    if accelerator._models or accelerator._optimizers:
        raise ValueError(
            "LongMoEPlugin.install comes before accelerator.prepare (and before Trainer.train): this Accelerator has"
            f" prepared {len(accelerator._models)} models and {len(accelerator._optimizers)} optimizers."
        )


def check_early_gradients(accelerator: Accelerator) -> None:
    """
    Raises:
        `ValueError`: gradients are still needed on the device when they would have left it.
    """
    reason = None
    if accelerator.scaler is not None:
        reason = 'mixed_precision="fp16" scales the loss, and divides the gradients before the step; use "bf16"'
    elif accelerator.gradient_accumulation_steps > 1:
        reason = (
            f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps} adds to gradients; make larger"
            " batches instead"
        )
    if reason is not None:
        raise ValueError(f"optimizer.early_gradients=True: {reason}, or use early_gradients=False.")


def state_bytes(optimizer: torch.optim.Optimizer, shards: int) -> int:
    """
    Bytes of host memory for the state on this rank.

    Arguments:
        shards: ranks over which whole parameters are still going to be divided.
    """
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    sharded = [param for param in params if isinstance(param, DTensor)]
    whole = [param for param in params if not isinstance(param, DTensor)]
    return bytes_of(sharded) - bytes_of(whole) // -shards
