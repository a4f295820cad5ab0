"""Logits that are not formed until somebody needs them.

While a model computes a loss, its `lm_head` gives `DeferredLogits`: hidden states and weight, with the operations that
the model applies to the logits (scales, a soft cap, casts) noted down. A loss that knows how works from those; any
other operation forms the logits, and they are then the stock model's in every respect, gradients included.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from hf_longmoe.integrations.transformers.logit_steps import (
    CASTS,
    CLONES,
    IN_PLACE,
    SHAPE_ONLY,
    Steps,
    cast_target,
    kept_entries,
)

__all__ = ["DeferredLogits", "LossCall", "current_call", "defer", "with_low_rank"]

_NOT_KEPT = (
    "The logits of a training step are not formed: the loss was computed without them. To read them, call the model"
    " without `labels` (it then gives its stock logits), or patch with LongMoEConfig(vocab=None)."
)
_STALE = (
    "These logits were not formed yet, and the weights that they come from have changed since. Read them before the"
    " optimizer's step, or patch with LongMoEConfig(vocab=None)."
)


@dataclass
class LossCall:
    """
    One forward of a model that computes a loss: between `begin` and `end` its heads defer their logits.

    Arguments:
        training: whether a backward follows. If not, logits may be formed on demand after the call.
    """

    training: bool
    loss_computed: bool = False  # by `TiledLoss`
    fallback: str | None = None  # why the logits were formed after all
    sources: list[_Source] = field(default_factory=list)
    _token: Token | None = None

    @torch.compiler.disable
    def begin(self) -> None:
        self._token = _current.set(self)

    @torch.compiler.disable
    def end(self) -> None:
        _current.reset(self._token)
        for source in self.sources:
            source.call = None
            if self.training and not source.formed:
                source.operands = None


# Per thread: models in different threads do not meet.
_current: ContextVar[LossCall | None] = ContextVar("hf_longmoe_loss_call", default=None)


def current_call() -> LossCall | None:
    return _current.get()


class _Source:
    """What logits are formed from, and how the stock model would: it is the one owner of hidden states and weight."""

    def __init__(
        self,
        call: LossCall,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ring: Any,
        low_rank: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self.call: LossCall | None = call  # until it ends
        self.ring, self.gathered, self.biased = ring, False, bias is not None
        own = (hidden, weight) if bias is None else (hidden, weight, bias)
        self.operands: tuple[torch.Tensor, ...] | None = own + low_rank
        self.training, self.formed = call.training, False
        device = hidden.device.type
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self.versions = _versions(self.operands)
        call.sources.append(self)

    @property
    def dtype(self) -> torch.dtype:
        _, dtype, enabled = self.autocast
        weight = self.operands[1]
        return dtype if enabled and weight.dtype != torch.float64 else weight.dtype

    def parts(self, operands: tuple[torch.Tensor, ...] | None = None) -> tuple[Any, ...]:
        """(hidden, weight, bias or `None`, (u, v) or `None`)."""
        hidden, weight, *more = self.operands if operands is None else operands
        return hidden, weight, more.pop(0) if self.biased else None, tuple(more) or None

    def project(self, applied: tuple, operands: tuple[torch.Tensor, ...]) -> torch.Tensor:
        device, dtype, enabled = self.autocast
        if self.ring is not None:
            operands = operands[0], *map(self.ring.gathered, operands[1:])
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            hidden, weight, bias, low_rank = self.parts(operands)
            logits = nn.functional.linear(hidden, weight, bias)
            if low_rank is not None:
                logits = (logits + nn.functional.linear(*low_rank)).to(logits.dtype)
            for func, arguments, options in applied:
                logits = func(logits, *arguments, **options)
        return logits


def _versions(tensors: tuple[torch.Tensor, ...]) -> list[int | None]:
    return [None if t.is_inference() else t._version for t in tensors]


def defer(
    call: LossCall,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ring: Any = None,
    vocab_size: int | None = None,
    gathered: bool = False,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> DeferredLogits:
    """
    Arguments:
        hidden: `[..., H]`; weight: `[V, H]`; bias: `[V]` or `None`.
        ring: where weight and bias are this rank's parts: a `ring_head.Ring`, and `vocab_size`, V.
        gathered: FSDP2 holds the gathered weight until backward. It hooks the logits to gather it again by then, and
            need not.
        low_rank: u `[..., r]` and v `[V, r]`, without a ring.

    Returns:
        What stands for `linear(hidden, weight, bias)`, with `linear(u, v)` added, `[..., V]`.
    """
    source = _Source(call, hidden, weight, bias, ring, low_rank or ())
    source.gathered = gathered
    return _derive(source, Steps(), (*hidden.shape[:-1], vocab_size or len(weight)), source.dtype, hidden.device)


def _derive(source: _Source, steps: Steps, shape: tuple, dtype: torch.dtype, device: torch.device) -> DeferredLogits:
    if source.call is None:  # after the call there is no graph to put them into
        return DeferredLogits(source, [steps], shape, dtype, device)
    return _Defer.apply(source, [steps], shape, dtype, device, *source.operands)


def with_low_rank(
    logits: torch.Tensor, u: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """
    What an adapter makes of the logits that its base layer has just given: `linear(u, v, bias)` is added, in the dtype
    of the logits.

    Arguments:
        logits: deferred or not, `[..., V]`.
        u: `[..., r]`; v: `[V, r]`; bias: `[V]`.
    """
    if isinstance(logits, DeferredLogits) and logits.ready and not logits.steps.applied and logits.source.ring is None:
        hidden, weight, own, _ = logits.source.parts()
        if bias is not None:
            own = bias.to(weight.dtype) if own is None else own + bias.to(own.dtype)
        return defer(logits.source.call, hidden, weight, own, gathered=logits.source.gathered, low_rank=(u, v))
    return (logits + nn.functional.linear(u, v, bias)).to(logits.dtype)


class _Defer(torch.autograd.Function):
    """Puts deferred logits into the graph, for what takes them without asking (an `autograd.Function`, say)."""

    @staticmethod
    def forward(ctx, source, cell, shape, dtype, device, *operands):
        ctx.source, ctx.cell = source, cell
        return DeferredLogits(source, cell, shape, dtype, device)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        source, needs = ctx.source, ctx.needs_input_grad[5:]
        if source.operands is None:
            raise RuntimeError(_NOT_KEPT)
        with torch.enable_grad():
            leaves = tuple(t.detach().requires_grad_(need) for t, need in zip(source.operands, needs, strict=True))
            logits = source.project(ctx.cell[0].applied, leaves)
        found = iter(torch.autograd.grad(logits, [t for t in leaves if t.requires_grad], gradient))
        return None, None, None, None, None, *(next(found) if need else None for need in needs)


class DeferredLogits(torch.Tensor):
    """
    Stands for logits `[..., V]`: their shape, dtype, device and place in the graph, but no storage.

    Scales, a soft cap, casts and the cut of a padded vocabulary are noted down. Any other operation forms the logits.
    After a training step there is nothing left to form them from, and an operation raises a `RuntimeError` that says
    how to get logits; after an evaluation they are formed on demand.
    """

    @staticmethod
    def __new__(
        cls, source: _Source, cell: list[Steps], shape: tuple, dtype: torch.dtype, device: torch.device
    ) -> DeferredLogits:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=False)
        # The cell holds the steps so far; the node in the graph shares it, since an in-place step changes both.
        self.source, self.cell, self._formed = source, cell, None
        return self

    @property
    def steps(self) -> Steps:
        return self.cell[0]

    def __repr__(self) -> str:
        if self._formed is not None or not self.source.training:
            return repr(self.formed("repr"))
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    @property
    def ready(self) -> bool:
        """Whether a loss can still be computed without forming them."""
        return self._formed is None and self.steps.transform is not None and self.source.operands is not None

    def formed(self, why: str) -> torch.Tensor:
        """The logits as the stock model has them; in training, differentiable."""
        if self._formed is None:
            self._formed = self._form(why, grad=self.source.training)
        return self._formed

    def settled(self) -> torch.Tensor:
        """What stands in the model's output: the logits where they were formed, else a tensor outside of the graph."""
        return self.detached() if self._formed is None else self._formed

    def detached(self) -> DeferredLogits:
        return DeferredLogits(self.source, [self.steps], self.shape, self.dtype, self.device)

    def _form(self, why: str, grad: bool) -> torch.Tensor:
        source = self.source
        if source.operands is None:
            raise RuntimeError(_NOT_KEPT)
        if _versions(source.operands) != source.versions:
            raise RuntimeError(_STALE)
        source.formed = True
        if source.call is not None and source.call.fallback is None:
            source.call.fallback = f"the model applies {why!r} to its logits, which the schedule does not know"
        with torch.set_grad_enabled(grad):
            return source.project(self.steps.applied, source.operands)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in SHAPE_ONLY or func is torch.Tensor.register_hook and args[0].source.gathered:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        spent = (
            args and isinstance(args[0], DeferredLogits) and args[0]._formed is None and not args[0].source.operands
        )
        if spent and func in CLONES:  # DDP copies every output of a training step, this placeholder too
            return args[0].detached()
        if args and isinstance(args[0], DeferredLogits) and args[0]._may_note():
            noted = args[0]._note(func, args[1:], kwargs)
            if noted is not None:
                return noted
        name = getattr(func, "__name__", str(func))
        args, kwargs = tree_map_only(DeferredLogits, lambda logits: logits.formed(name), (args, kwargs))
        return func(*args, **kwargs)

    def _may_note(self) -> bool:
        # Inside an autograd.Function grad mode is off, and what its forward does must stay apart from its backward.
        inside = self.source.call is not None and self.source.training and not torch.is_grad_enabled()
        return self._formed is None and not inside

    def _note(self, func: Callable, operands: tuple, options: dict) -> DeferredLogits | None:
        """One more operation, not carried out; `None` if it must be."""
        dtype, shape = self.dtype, self.shape
        if func is torch.Tensor.__getitem__:  # of a padded vocabulary
            kept = kept_entries(shape, func, operands, options)
            if kept is None or self.source.ring is not None:
                return None
            shape = (*shape[:-1], kept)
        if func in CASTS:
            dtype = cast_target(self, func, operands, options)
            if dtype == self.dtype:
                return self
        steps = self.steps.then(func, operands, options)
        if dtype is None or steps is None:
            return None
        if func in IN_PLACE:
            self.cell[0] = steps
            return self
        return _derive(self.source, steps, shape, dtype, self.device)

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Below autograd: the graph is above, and what is formed here must not be taken for the tensor that has one.
        if func._schema.is_mutable and any(isinstance(a, DeferredLogits) for a in args):
            raise RuntimeError(f"{func} writes into logits that are not formed; patch with LongMoEConfig(vocab=None).")
        args, kwargs = tree_map_only(DeferredLogits, lambda logits: logits._values(str(func)), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _values(self, why: str) -> torch.Tensor:
        return self._form(why, grad=False) if self._formed is None else self._formed.detach()
