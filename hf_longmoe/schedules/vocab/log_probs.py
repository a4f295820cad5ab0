"""Per-token log-probabilities: the log-sum-exp is kept, and each tile's logits are recomputed in backward."""

from __future__ import annotations

import torch

from hf_longmoe.schedules.vocab.head import Head, HeadGradients, HeadPlan
from hf_longmoe.schedules.vocab.loss import refuse_double_backward

__all__ = ["LogProbs"]


class LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, plan: HeadPlan):
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head(hidden, weight, bias, plan, keep_logits=False)
            log_probs = head.buffer.new_zeros(hidden.shape[0])
            normalizers = torch.zeros_like(log_probs)
            for where, logits, _, _, labels in head.tiles():
                largest = logits.amax(1, keepdim=True)
                target = logits.gather(1, labels) - largest
                lse = logits.sub_(largest).exp_().sum(1, keepdim=True).log_()
                log_probs[where] = (target - lse).squeeze(1)
                normalizers[where] = (lse + largest).squeeze(1)
        ctx.plan = plan
        ctx.save_for_backward(hidden, weight, bias, normalizers)
        return log_probs

    @staticmethod
    def backward(ctx, upstream):
        refuse_double_backward("token_log_probs")
        hidden, weight, bias, normalizers = ctx.saved_tensors
        plan = ctx.plan
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head(hidden, weight, bias, plan)
            gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3], plan.valid)
            scaled = upstream * plan.transform.scale
            for where, logits, kept, block, labels in head.tiles():
                factor = scaled[where].unsqueeze(1)
                logits.sub_(normalizers[where].unsqueeze(1)).exp_().mul_(factor.neg())
                logits.scatter_add_(1, labels, factor)
                head.backward(gradients, where, logits, kept, block)
            results = []
            for gradient, tensor in zip(
                (gradients.dh, gradients.dw, gradients.db), (hidden, weight, bias), strict=True
            ):
                results.append(None if gradient is None else gradient.to(tensor.dtype))
        return (*results, None)
