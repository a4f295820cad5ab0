"""The scalar loss: one sweep over the tiles computes it and, where needed, all of its gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_longmoe.schedules.vocab.head import Head, HeadGradients, HeadPlan
from hf_longmoe.schedules.vocab.statistics import TokenStatistics

__all__ = ["Loss", "LossPlan", "refuse_double_backward"]


@dataclass(frozen=True, kw_only=True)
class LossPlan(HeadPlan):
    """Everything about a call but its tensors; the other fields as in `linear_cross_entropy`."""

    num_items: float | torch.Tensor | None
    label_smoothing: float
    z_loss: float
    vocab_size: int


class Loss(torch.autograd.Function):
    """
    Gradients are computed in forward, of the SUM over tokens: dividing by the number of items, and the upstream
    gradient, come last, in the accumulation dtype, so that a half-precision gradient is rounded once and a loss scale
    reaches it before that.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, u, v, plan: LossPlan, grad_enabled: bool, collected: list | None):
        # `needs_input_grad` does not know of no_grad.
        needs = tuple(grad_enabled and need for need in ctx.needs_input_grad[:5])
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = None
            if any(needs):
                gradients = HeadGradients(hidden, weight, bias, needs, plan.valid, (u, v), plan.vocab_size)
            n = plan.vocab_size
            first_weight, first_bias, first_v = (None if part is None else part[:n] for part in (weight, bias, v))
            head = Head(hidden, first_weight, first_bias, plan, low_rank=(u, first_v))
            statistics = None
            if collected is not None:
                statistics = TokenStatistics.zeros(hidden.shape[0], head.wide, hidden.device)
                collected.append(statistics)
            total = _sweep(head, gradients, statistics, plan)
            items = _items(plan, total)
            ctx.unit = head.products.unit
            ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias, u, v)]
            # Not saved tensors: they are handed over in backward and must not outlive it.
            ctx.gradients, ctx.items = gradients, items
            return total / items

    @staticmethod
    def backward(ctx, upstream):
        refuse_double_backward("linear_cross_entropy")
        gradients = ctx.gradients
        if gradients is None:
            raise RuntimeError(
                "The gradients of this linear_cross_entropy were handed over already; for a second backward through "
                "the same graph, call the first with retain_graph=True."
            )
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        if not keep:
            ctx.gradients = None
        with torch.autocast(upstream.device.type, enabled=False):
            factor = upstream / (ctx.items * ctx.unit)
            results = []
            for name, dtype in zip(("dh", "dw", "db", "du", "dv"), ctx.dtypes, strict=True):
                gradient = gradients.whole(name)
                if gradient is not None:
                    # In place, the buffer itself becomes the parameter's gradient: no second [V, H] tensor.
                    gradient = (gradient * factor if keep else gradient.mul_(factor)).to(dtype)
                    if not keep:
                        gradients.drop(name)
                results.append(gradient)
        return (*results, None, None, None)


def refuse_double_backward(name: str) -> None:
    """Raises:
    `RuntimeError`: called in a backward with `create_graph=True`.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no second derivative: its logits are not kept. Call backward without create_graph=True, or "
            "use torch.nn.functional.linear and cross_entropy."
        )


def _items(plan: LossPlan, total: torch.Tensor) -> float | torch.Tensor:
    if plan.valid.count == 0:
        return 1  # the sum is zero, whatever it is divided by
    if plan.num_items is None:
        return plan.valid.count
    if isinstance(plan.num_items, torch.Tensor):
        return plan.num_items.detach().reshape(()).to(total)
    if plan.num_items == 0:
        raise ValueError(f"num_items=0, but {plan.valid.count} tokens have labels; give the number of tokens.")
    return plan.num_items


def _sweep(
    head: Head, gradients: HeadGradients | None, statistics: TokenStatistics | None, plan: LossPlan
) -> torch.Tensor:
    """
    The sum of the tokens' losses.

    Everything is relative to the row's largest logit: for large logits lse - z[label] would cancel.
    """
    valid, smoothing, z_loss = plan.valid, plan.label_smoothing, plan.z_loss
    losses = head.buffer.new_zeros(valid.count)
    done = 0
    for where, logits, kept, hidden, labels in head.tiles():
        if statistics is not None:
            statistics.correct[where] = logits.argmax(1) == labels.squeeze(1)
            if plan.transform.softcap is None:
                kept.copy_(logits)
        largest = logits.amax(1, keepdim=True)
        target = logits.gather(1, labels) - largest
        logits.sub_(largest)
        mean = logits.mean(1, keepdim=True) if smoothing else None
        scale = logits.exp_().sum(1, keepdim=True)
        lse = scale.log()
        loss = lse - target if mean is None else lse - (1.0 - smoothing) * target - smoothing * mean
        if statistics is not None:
            statistics.log_probs[where] = (target - lse).squeeze(1)
            # Σ p·z without another [r, V]: a product of each row of exponentials with its logits.
            expected = torch.bmm(logits.unsqueeze(1), kept.unsqueeze(2)).squeeze(2).div_(scale)
            if plan.transform.softcap is not None:
                expected.mul_(plan.transform.softcap)
            statistics.entropy[where] = (lse + largest - expected).squeeze(1)
        slope = scale.reciprocal_()
        if z_loss:
            lse = lse + largest
            loss = loss + z_loss * lse.square()
            slope = slope * (1.0 + 2.0 * z_loss * lse)
        losses[done : done + loss.shape[0]] = loss.squeeze(1)
        done += loss.shape[0]
        if gradients is not None:
            unit = plan.transform.scale * head.products.unit
            logits.mul_(slope * unit)
            if smoothing:
                logits.sub_(smoothing * unit / logits.shape[1])
            logits.scatter_add_(1, labels, torch.full_like(target, (smoothing - 1.0) * unit))
            head.backward(gradients, where, logits, kept, hidden)
    return losses.sum()
