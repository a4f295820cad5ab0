"""Per-token values: the log-sum-exp is kept, and each tile's logits are recomputed in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hf_longmoe.schedules.vocab.head import Head, HeadGradients, HeadPlan
from hf_longmoe.schedules.vocab.loss import refuse_double_backward

__all__ = ["LogProbs", "TokenPlan"]


@dataclass(frozen=True, kw_only=True)
class TokenPlan(HeadPlan):
    """
    Arguments:
        fields: which of the optional fields of `TokenStatistics` are computed.
        entropy_rows: gives the tokens of a tile in a backward that reaches the entropy, which needs the logits kept.
        name: of the public function, for messages.
    """

    fields: tuple[str, ...] = ()
    entropy_rows: Callable[[], int]
    name: str = "token_log_probs"


class LogProbs(torch.autograd.Function):
    """
    `apply(hidden [T, H], weight [V, H], bias [V] or None, u [T, r] and v [V, r] or None, plan)`: log_probs, entropy,
    correct, mean_logits and log_sum_squares of `TokenStatistics`, each [T]; `None` for those not asked for.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, u, v, plan: TokenPlan):
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs backward nothing
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head(hidden, weight, bias, plan, keep_logits=False, low_rank=(u, v))
            log_probs = head.buffer.new_zeros(hidden.shape[0])
            normalizers = torch.zeros_like(log_probs)
            found = {name: torch.zeros_like(log_probs) for name in plan.fields if name != "correct"}
            if "correct" in plan.fields:
                found["correct"] = torch.zeros_like(log_probs, dtype=torch.bool)
            for where, logits, _, _, labels in head.tiles():
                values = _values(logits, labels, plan.fields)
                log_probs[where], normalizers[where] = values.pop("log_probs"), values.pop("normalizers")
                for name, value in values.items():
                    found[name][where] = value
        entropy = found.get("entropy")
        ctx.plan = plan
        ctx.save_for_backward(hidden, weight, bias, u, v, normalizers, entropy)
        rest = [found.get(name) for name in ("correct", "mean_logits", "log_sum_squares")]
        ctx.mark_non_differentiable(*(value for value in rest if value is not None))
        return log_probs, entropy, *rest

    @staticmethod
    def backward(ctx, for_log_probs, for_entropy, *_):
        plan = ctx.plan
        refuse_double_backward(plan.name)
        hidden, weight, bias, u, v, normalizers, entropy = ctx.saved_tensors
        if for_log_probs is None:
            for_log_probs = torch.zeros_like(normalizers)
        if for_entropy is not None:
            plan = replace(plan, rows=plan.entropy_rows(), keep_logits=True)
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head(hidden, weight, bias, plan, low_rank=(u, v))
            gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:5], plan.valid, (u, v))
            scale = plan.transform.scale  # and not the products' unit: a loss scale is in what came
            for where, logits, kept, block, labels in head.tiles():
                factor = (for_log_probs[where] * scale).unsqueeze(1)
                logits.sub_(normalizers[where].unsqueeze(1))
                if for_entropy is None:
                    logits.exp_().mul_(factor.neg())
                else:
                    slope = (for_entropy[where] * scale).unsqueeze(1)
                    # d entropy / dz = -p·(log p + entropy)
                    _times_log(logits, kept, slope.neg(), -factor - slope * entropy[where].unsqueeze(1))
                    if plan.transform.softcap is not None:
                        head.again(where, block, kept)
                logits.scatter_add_(1, labels, factor)
                head.backward(gradients, where, logits, kept, block)
            results = []
            for name, tensor in zip(("dh", "dw", "db", "du", "dv"), (hidden, weight, bias, u, v), strict=True):
                gradient = getattr(gradients, name)
                if gradient is not None:
                    gradient = gradient.to(tensor.dtype)
                    setattr(gradients, name, None)
                results.append(gradient)
        return (*results, None)


def _values(logits: torch.Tensor, labels: torch.Tensor, fields: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Of a tile: logits [r, V], which are consumed, and labels [r, 1] -> values [r]. Needs no second tile."""
    values = {}
    if "mean_logits" in fields:
        values["mean_logits"] = logits.mean(1)
    if "correct" in fields:
        values["correct"] = logits.argmax(1) == labels.squeeze(1)
    largest = logits.amax(1, keepdim=True)
    target = logits.gather(1, labels) - largest
    scale = logits.sub_(largest).exp_().sum(1, keepdim=True)
    lse = scale.log()
    values["log_probs"] = (target - lse).squeeze(1)
    values["normalizers"] = (lse + largest).squeeze(1)
    if "log_sum_squares" in fields or "entropy" in fields:
        logits.div_(scale)
    if "log_sum_squares" in fields:
        values["log_sum_squares"] = torch.linalg.vector_norm(logits, dim=1).log_().mul_(2.0)
    if "entropy" in fields:
        values["entropy"] = torch.special.entr(logits, out=logits).sum(1)
    return values


def _times_log(log_p: torch.Tensor, kept: torch.Tensor, slope: torch.Tensor, constant: torch.Tensor) -> None:
    """log p [r, V] becomes p·(slope·log p + constant), both [r, 1]; `kept` [r, V] is overwritten."""
    kept.copy_(log_p).mul_(slope).add_(constant)
    log_p.exp_().mul_(kept)
