"""Plain AdamWs, the streaming ones in their place, and the wrappers that Accelerate puts around either."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
from torch.distributed.tensor import DTensor

from hf_longmoe.schedules.optimizer import OffloadStreamAdamW

__all__ = ["give_back", "is_sharded", "plain_of", "put", "tell_schedulers"]


def plain_of(optimizer: Any) -> Any:
    """What is to be streamed: an optimizer that is not yet, or the AdamW in Accelerate's wrapper; else `None`."""
    if isinstance(optimizer, AcceleratedOptimizer):
        return optimizer.optimizer if type(optimizer.optimizer) is torch.optim.AdamW else None
    streamed = not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, OffloadStreamAdamW)
    return None if streamed else optimizer


def put(prepared: AcceleratedOptimizer, optimizer: torch.optim.Optimizer) -> None:
    """Has Accelerate's wrapper step another optimizer."""
    prepared.optimizer = optimizer
    if prepared.scaler is not None:
        prepared._optimizer_original_step_method = optimizer.step
        prepared._optimizer_patched_step_method = patch_optimizer_step(prepared, optimizer.step)


def give_back(streaming: OffloadStreamAdamW, prepared: Iterable[Any]) -> None:
    """The AdamW that `streaming` replaces takes its state and its place, in those of `prepared` that step it."""
    streaming.disarm()
    streaming.replaces.load_state_dict(streaming.plain_state_dict())
    for one in prepared:
        if isinstance(one, AcceleratedOptimizer) and one.optimizer is streaming:
            put(one, streaming.replaces)


def tell_schedulers(accelerator: Accelerator) -> None:
    """Accelerate finds a scheduler's optimizer by identity; where it finds none, it waits for all of them to step."""
    for scheduler in accelerator._schedulers:
        made_for = getattr(scheduler.scheduler, "optimizer", None)
        for prepared in accelerator._optimizers:
            streaming = prepared.optimizer
            if isinstance(streaming, OffloadStreamAdamW) and made_for is not None and streaming.replaces is made_for:
                scheduler.optimizers = [prepared]


def is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])
