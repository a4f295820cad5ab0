"""Two autograd nodes that let activation checkpointing recompute a layer without running its schedule again.

Non-reentrant checkpointing recomputes a layer only up to the last tensor that it saved. So the work is split:

    inputs ──> _Save: saves the inputs; does all the work of backward ──> token (a scalar)
    inputs (detached), token ──> _Run: does the work of forward; saves nothing ──> output

In backward `_Run` only hands the output's gradient over; `_Save` then recomputes what it needs, block by block. The
recompute of the layer ends at `_Save`, before the work runs again. Where something after it saves tensors, the replay
does reach `_Run`; if those tensors do not depend on its output, the values are dead and it returns NaN, unread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hf_longmoe.schedules.replay import replaying

__all__ = ["Work", "save_and_run"]


class Work(Protocol):
    """One call of one schedule, from its forward to the end of its backward."""

    output_saved_after: bool
    """Whether something after it, in the same checkpointed layer, saves a tensor that depends on its output."""

    def prepare(self, *tensors: torch.Tensor) -> None:
        """Whatever backward needs to know beside the saved tensors; runs in every pass."""

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The output; shape, dtype and device of the first tensor."""

    def backward(
        self, g: torch.Tensor, needs: Sequence[bool], *tensors: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        """The gradient of each tensor that `needs` one."""


def save_and_run(work: Work, *tensors: torch.Tensor) -> torch.Tensor:
    """
    `work.forward(*tensors)`, differentiable by `work.backward`.

    Backward runs under the autocast state of the forward. It may be repeated (`retain_graph=True`), but has no
    derivative of its own: `create_graph=True` raises a `RuntimeError`.
    """
    token = _Save.apply(work, *tensors)
    return _Run.apply(token, work, *(t.detach() for t in tensors))


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx, work, *tensors):
        device = tensors[0].device.type
        ctx.work = work
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.save_for_backward(*tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(ctx.work).__name__} has no second derivative: call backward without create_graph=True."
            )
        device, dtype, enabled = ctx.autocast
        gradient, ctx.work.gradient = ctx.work.gradient, None
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            return None, *ctx.work.backward(gradient, ctx.needs_input_grad[1:], *ctx.saved_tensors)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, work, *tensors):
        ctx.work, ctx.inputs = work, 2 + len(tensors)
        work.prepare(*tensors)
        if replaying() and not work.output_saved_after:
            return torch.full_like(tensors[0], float("nan"))
        return work.forward(*tensors)

    @staticmethod
    def backward(ctx, gradient):
        ctx.work.gradient = gradient
        return gradient.new_zeros(()), *[None] * (ctx.inputs - 1)
