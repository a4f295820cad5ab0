"""The LM head: logits that are not formed until somebody needs them, and a loss that does not.

While a model computes a loss, its `lm_head` gives `DeferredLogits`: hidden states and weight, with the operations that
the model applies to the logits (scales, a soft cap, casts) noted down. The model's `loss_function` then runs the
vocabulary schedule on them. So every family's own `forward` stays as it is, whatever it does around the head.
An operation that the schedule does not know forms the logits, and the stock loss follows: exact, but unbounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_longmoe.config import VocabConfig
from hf_longmoe.schedules.vocab import LogitTransform, linear_cross_entropy, tile_rows

__all__ = ["DeferredLogits", "Head", "TiledLoss", "head_report", "patch_head", "restore_head"]


@dataclass
class Head:
    """What an `lm_head` and the loss of one model share; `deferring` is set while the model computes a loss."""

    config: VocabConfig
    deferring: bool = False
    loss_computed: bool = False
    fallback: str | None = None  # why this call formed its logits after all
    stock_loss: Callable | None = None  # what the instance had as its `loss_function`, if anything

    def rows(self, lm_head: nn.Linear) -> int:
        """Tokens of a tile; raises as `tile_rows` does."""
        weight = lm_head.weight
        return tile_rows(self.config.budget, *weight.shape, dtype=weight.dtype, bias=lm_head.bias is not None)


@dataclass
class _Source:
    """The one owner of what logits can be formed from; emptied once a training loss has been computed."""

    head: Head
    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True)
class _Steps:
    """The operations applied so far: factors, then perhaps a tanh and the soft cap it is multiplied by."""

    scale: float = 1.0
    tanh: bool = False
    softcap: float | None = None
    dtype: torch.dtype | None = None
    applied: tuple[tuple[Callable, tuple], ...] = field(default=())

    def then(self, func: Callable, operands: tuple) -> _Steps | None:
        """With one more operation; `None` where the schedule cannot express it."""
        done = replace(self, applied=(*self.applied, (func, operands)))
        if func in _CASTS:
            dtype = torch.float32 if func is torch.Tensor.float else _cast_target(operands)
            return None if dtype is None or not dtype.is_floating_point else replace(done, dtype=dtype)
        if func in (torch.tanh, torch.Tensor.tanh) and not self.tanh and self.softcap is None:
            return replace(done, tanh=True)
        if len(operands) == 1 and isinstance(operands[0], (int, float)) and operands[0] != 0:
            factor = float(operands[0])
            if self.tanh and self.softcap is None and func in _MULTIPLIES:
                # z = factor * tanh(scale * x), which is a soft cap of `factor` on scale * factor * x
                return replace(done, softcap=factor, scale=self.scale * factor) if factor > 0 else None
            if not self.tanh and func in _MULTIPLIES:
                return replace(done, scale=self.scale * factor)
            if not self.tanh and func in _DIVIDES:
                return replace(done, scale=self.scale / factor)
        return None

    @property
    def transform(self) -> LogitTransform | None:
        """`None` for a tanh whose soft cap has not been multiplied back."""
        return None if self.tanh and self.softcap is None else LogitTransform(self.scale, self.softcap)


_MULTIPLIES = (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.Tensor.mul_)
_DIVIDES = (torch.div, torch.Tensor.div, torch.Tensor.__truediv__, torch.Tensor.div_)
_CASTS = (torch.Tensor.float, torch.Tensor.to)
_SHAPE_ONLY = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "grad_fn", "layout", "is_cuda", "is_cpu", "ndim", "grad")
) | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.stride}
_NOT_KEPT = (
    "The logits of a training step are not formed: the loss was computed without them. To read them, call the model"
    " without `labels` (it then gives its stock logits), or patch with LongMoEConfig(vocab=None)."
)


def _cast_target(operands: tuple) -> torch.dtype | None:
    return operands[0] if len(operands) == 1 and isinstance(operands[0], torch.dtype) else None


class DeferredLogits(torch.Tensor):
    """
    Stands for logits `[..., V]`: their shape, dtype and device, but no storage.

    During the model's forward it notes scales, a soft cap and casts. Any other operation forms the logits. After a
    training loss there is nothing to form them from, and an operation raises a `RuntimeError` that says how to get
    logits; after an evaluation loss they are formed on demand.
    """

    @staticmethod
    def __new__(cls, source: _Source, like: torch.Tensor, steps: _Steps) -> DeferredLogits:
        dtype = steps.dtype or (source.weight.dtype if source.weight is not None else like.dtype)
        shape = like.shape if isinstance(like, DeferredLogits) else (*like.shape[:-1], source.weight.shape[0])
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=like.device, requires_grad=False)
        self.source, self.steps = source, steps
        return self

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def formed(self, why: str) -> torch.Tensor:
        """The logits as the stock model has them, differentiable while the training loss has not been computed."""
        source = self.source
        if source.hidden is None:
            raise RuntimeError(_NOT_KEPT)
        if torch.is_grad_enabled():
            source.head.fallback = f"the model applies {why!r} to its logits, which the schedule does not know"
        logits = nn.functional.linear(source.hidden, source.weight, source.bias)
        for func, operands in self.steps.applied:
            logits = func(logits, *operands)
        return logits

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _SHAPE_ONLY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if args and isinstance(args[0], DeferredLogits) and not kwargs:
            steps = args[0].steps.then(func, args[1:])
            if steps is not None:
                return DeferredLogits(args[0].source, args[0], steps)
        name = getattr(func, "__name__", str(func))
        args = torch.utils._pytree.tree_map_only(DeferredLogits, lambda t: t.formed(name), args)
        kwargs = torch.utils._pytree.tree_map_only(DeferredLogits, lambda t: t.formed(name), kwargs or {})
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args = torch.utils._pytree.tree_map_only(DeferredLogits, lambda t: t.formed(str(func)), args)
        return func(*args, **(kwargs or {}))


def head_report(model: PreTrainedModel, lm_head: nn.Module) -> str | None:
    """Why the schedule cannot take this head's loss over; `None` if it can."""
    if not isinstance(lm_head, nn.Linear):
        return f"it is a {type(lm_head).__name__}, not an nn.Linear"
    if model.loss_function is not ForCausalLMLoss:
        return f"its loss is {getattr(model.loss_function, '__name__', model.loss_function)}, not ForCausalLMLoss"
    return None


def patch_head(model: PreTrainedModel, lm_head: nn.Linear, head: Head) -> None:
    lm_head.longmoe_head = head
    lm_head.forward = MethodType(_head_forward, lm_head)
    head.stock_loss = vars(model).get("_loss_function")
    model.loss_function = TiledLoss(model.loss_function)


def restore_head(model: PreTrainedModel, head: Head) -> None:
    for module in model.modules():
        if vars(module).get("longmoe_head") is head:
            del module.longmoe_head, module.forward
    if isinstance(vars(model).get("_loss_function"), TiledLoss):
        del model._loss_function
        if head.stock_loss is not None:
            model.loss_function = head.stock_loss


@torch.compiler.disable
def _head_forward(self: nn.Linear, hidden_states: torch.Tensor) -> torch.Tensor:
    head: Head = self.longmoe_head
    if head.deferring and (isinstance(self, FSDPModule) or isinstance(self.weight, DTensor)):
        head.fallback = "FSDP2 or tensor parallelism shards it, and frees the gathered weight before the loss"
    if not head.deferring or head.fallback:
        return type(self).forward(self, hidden_states)
    return DeferredLogits(_Source(head, hidden_states, self.weight, self.bias), hidden_states, _Steps())


class TiledLoss:
    """`model.loss_function`: the vocabulary schedule on deferred logits, the model's own loss on any other."""

    def __init__(self, stock: Callable) -> None:
        self.stock = stock

    @torch.compiler.disable
    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As `ForCausalLMLoss`, which shifts `labels` unless `shift_labels` are given."""
        options = dict(num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, shift_labels=shift_labels)
        deferred = isinstance(logits, DeferredLogits)
        if not deferred or logits.steps.transform is None or logits.shape[-1] != vocab_size:
            if deferred:
                logits = logits.formed("loss_function")
            return self.stock(logits, labels, vocab_size, **options, **kwargs)
        source, config = logits.source, logits.source.head.config
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = linear_cross_entropy(
            source.hidden,
            source.weight,
            shift_labels.reshape(source.hidden.shape[:-1]),
            bias=source.bias,
            budget=config.budget,
            ignore_index=ignore_index,
            num_items=num_items_in_batch,
            transform=logits.steps.transform,
            label_smoothing=config.label_smoothing,
            z_loss=config.z_loss,
        )
        source.head.loss_computed = True
        if torch.is_grad_enabled():
            source.hidden = source.weight = source.bias = None
        return loss
