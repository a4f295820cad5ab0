"""Forward and backward of a call of the ring as one autograd node. See `ring.py`."""

from __future__ import annotations

import torch

from hf_longmoe.schedules.vocab.loss import refuse_double_backward
from hf_longmoe.schedules.vocab.ring_hops import RingCall
from hf_longmoe.schedules.vocab.ring_pass import BackwardPass, ForwardPass

__all__ = ["RingLoss"]


class RingLoss(torch.autograd.Function):
    """The rank's own loss, `apply(hidden [T, H], shard [v, H], bias [v] or None, call)`: a scalar."""

    @staticmethod
    def forward(ctx, hidden, shard, bias, call: RingCall):
        with torch.autocast(hidden.device.type, enabled=False), call.wire.together():
            total, statistics = ForwardPass(call, hidden, shard, bias, gradient=False).run()
            ctx.call = call
            ctx.save_for_backward(hidden, shard, bias, statistics)
            return total / call.items

    @staticmethod
    def backward(ctx, upstream):
        refuse_double_backward("ring_cross_entropy")
        hidden, shard, bias, statistics = ctx.saved_tensors
        call = ctx.call
        with torch.autocast(hidden.device.type, enabled=False), call.wire.together():
            coefficient = (upstream / call.items).to(statistics.dtype)
            gradients = list(BackwardPass(call, hidden, shard, bias, statistics, coefficient).run())
        for place, operand in enumerate((hidden, shard, bias)):
            if gradients[place] is not None:  # one after the other, each in the place of the wide one
                gradients[place] = gradients[place].to(operand.dtype)
        return (*gradients, None)
