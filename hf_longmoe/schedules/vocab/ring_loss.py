"""Forward and backward of a call of the ring as one autograd node. See `ring.py`."""

from __future__ import annotations

import torch

from hf_longmoe.schedules.vocab.loss import refuse_double_backward
from hf_longmoe.schedules.vocab.ring_frozen import FrozenPass
from hf_longmoe.schedules.vocab.ring_hops import RingCall
from hf_longmoe.schedules.vocab.ring_pass import BackwardPass, ForwardPass
from hf_longmoe.schedules.vocab.ring_sums import SumsBackward, SumsForward

__all__ = ["RingLoss"]


class RingLoss(torch.autograd.Function):
    """The rank's own loss, `apply(hidden [T, H], shard [v, H], bias [v] or None, call)`: a scalar."""

    @staticmethod
    def forward(ctx, hidden, shard, bias, call: RingCall):
        ctx.call = call
        with torch.autocast(hidden.device.type, enabled=False), call.wire.together():
            if call.one_pass:
                # Not a saved tensor: it is handed over in backward and must not outlive it.
                total, ctx.dh = FrozenPass(call, hidden, shard, bias, gradient=True).run()
                ctx.dtype = hidden.dtype
            else:
                forward = SumsForward if call.plan.travel == "sums" else ForwardPass
                total, statistics = forward(call, hidden, shard, bias, gradient=False).run()
                ctx.save_for_backward(hidden, shard, bias, statistics)
            return total / call.items

    @staticmethod
    def backward(ctx, upstream):
        refuse_double_backward("ring_cross_entropy")
        call = ctx.call
        if call.one_pass:
            return _hand_over(ctx, upstream / call.items), None, None, None
        hidden, shard, bias, statistics = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False), call.wire.together():
            coefficient = (upstream / call.items).to(statistics.dtype)
            backward = SumsBackward if call.plan.travel == "sums" else BackwardPass
            gradients = list(backward(call, hidden, shard, bias, statistics, coefficient).run())
        for place, operand in enumerate((hidden, shard, bias)):
            if gradients[place] is not None:  # one after the other, each in the place of the wide one
                gradients[place] = gradients[place].to(operand.dtype)
        return (*gradients, None)


def _hand_over(ctx, factor: torch.Tensor) -> torch.Tensor:
    dh = ctx.dh
    if dh is None:
        raise RuntimeError(
            "The gradient of this ring_cross_entropy was handed over already; for a second backward through the same"
            " graph, call the first with retain_graph=True."
        )
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return (dh * factor).to(ctx.dtype)
    ctx.dh = None
    return dh.mul_(factor).to(ctx.dtype)
