"""`watch`: marks the components of a Transformers causal LM for the probes that are open. Patched or stock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from hf_longmoe.integrations.transformers.causal_lm import causal_lm
from hf_longmoe.integrations.transformers.checkpoint_function import Observed, checkpoint_functions
from hf_longmoe.integrations.transformers.deferred import DeferredLogits
from hf_longmoe.integrations.transformers.dispatch_modules import DispatchModule, dispatch_modules
from hf_longmoe.peaks import component
from hf_longmoe.peaks.region import made, pop, push, tag
from hf_longmoe.peaks.storage import storages
from hf_longmoe.schedules.numerics import autocast_dtype
from hf_longmoe.schedules.optimizer import OffloadStreamAdamW
from hf_longmoe.schedules.vocab import beside_bytes, ring_beside_bytes

__all__ = ["Watch", "watch"]


class Watch:
    """What `watch` has installed. `remove()` takes all of it off again; as a context manager it does so on exit."""

    def __init__(self) -> None:
        # Bytes that caps leave aside: see DispatchModule.beside_cap and schedules.vocab.beside_bytes.
        self.beside_caps = {"dispatch": 0, "vocab": 0}
        self._undo: list[Callable[[], Any]] = []
        self._regions: list[Any] = []

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def remove(self) -> None:
        for region in self._regions:  # left open where an exception kept a hook from running
            pop(region)
        while self._undo:
            self._undo.pop()()

    def _push(self, name: str, capped: bool = True, part: str = "") -> Any:
        region = push(name, capped, part)
        if region is not None:
            self._regions.append(region)
        return region

    def _pop(self, region: Any) -> None:
        pop(region)
        if region in self._regions:
            self._regions.remove(region)

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _around(self, module: nn.Module, before: Callable, after: Callable) -> None:
        self._hook(module.register_forward_pre_hook(before, with_kwargs=True))
        self._hook(module.register_forward_hook(after, always_call=True))

    def _bracket(
        self, module: nn.Module, name: str, within: str | None = None, capped: bool = True, part: str = ""
    ) -> None:
        """Every forward of `module` is a region, within one of the component `within`."""
        regions: list[Any] = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if within is not None:
                made(within, args, capped=within != name)
            regions.append(self._push(name, capped, part))

        def after(_: nn.Module, args: Any, output: Any) -> None:
            made(name, output, capped=capped)
            if regions:
                self._pop(regions.pop())

        self._around(module, before, after)


class _Call:
    """One forward of the model: which of the regions that span several of its modules are open."""

    def __init__(self, has_labels: bool, has_router_loss: bool):
        self.has_labels, self.has_router_loss = has_labels, has_router_loss
        self.vocab = self.aux = None


def watch(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Watch:
    """
    Marks regions and tags tensors for every probe that is open, now or later, until the handle is removed:

    - `dispatch`: MoE blocks (router, experts, shared experts) and the dense MLPs of a MoE model's other layers;
    - `vocab`: from the LM head to the end of `loss_function`; `aux`: from there to the end of the model's forward,
      and the router logits kept for it, where router logits are in use;
    - `layer`: all else within the base model, in forward and in checkpointing's recompute;
    - `boundaries`: the inputs of layers that checkpoint;
    - `parameters`, `gradients`; and `optimizer`: its state, and all that its step allocates.

    Arguments:
        model (`nn.Module`): a `PreTrainedModel`, or a wrapper (DDP, PEFT) that holds one.
        optimizer (`torch.optim.Optimizer`, *optional*): the one whose step to watch, Accelerate's wrapper or not.

    Returns:
        `Watch`: the handle.

    Raises:
        `ValueError`: `model` holds no Transformers model.
    """
    model = causal_lm(model)
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    handle = Watch()
    _watch_tensors(handle, model, optimizer)
    calls = _watch_model(handle, model, optimizer)
    _watch_head(handle, model, calls)
    for part in dispatch_modules(model):
        handle._bracket(part.module, "dispatch", part.within, part.capped, part.part)
        if part.capped:
            handle._hook(part.module.register_forward_pre_hook(partial(_note_beside_cap, handle, part)))
    for layer, place in checkpoint_functions(model):
        _watch_checkpoint(handle, layer, place)
    if optimizer is not None:
        _watch_optimizer(handle, optimizer)
    return handle


@torch.compiler.disable
def _note_beside_cap(handle: Watch, part: DispatchModule, _: nn.Module, args: Any) -> None:
    handle.beside_caps["dispatch"] = max(handle.beside_caps["dispatch"], part.beside_cap(args))


def _resident(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    parameters = list(model.parameters())
    tag("parameters", parameters, list(model.buffers()))
    tag("gradients", [parameter.grad for parameter in parameters])
    if optimizer is not None:
        tag("optimizer", _state(optimizer))


def _watch_tensors(handle: Watch, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    _resident(model, optimizer)
    watched: set[nn.Parameter] = set()

    def watch_gradients(module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad and parameter not in watched:
                watched.add(parameter)
                limit = parameter.numel() * parameter.element_size()
                handle._hook(parameter.register_hook(partial(_tag_incoming, limit)))
                handle._hook(parameter.register_post_accumulate_grad_hook(lambda p: tag("gradients", p.grad)))

    def gathered(module: nn.Module, _: Any) -> None:
        tag("parameters", list(module.parameters()))
        watch_gradients(module)

    watch_gradients(model)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            # FSDP2's own hook comes first, so that here the parameters are the gathered ones: others than the model's.
            handle._hook(module.register_forward_pre_hook(gathered))


def _tag_incoming(limit: int, gradient: torch.Tensor) -> None:
    # Under accumulation it is added to `.grad` and dropped. A larger storage is not the gradient's own.
    if all(storage.nbytes() <= limit for storage, _ in storages(gradient)):
        tag("gradients", gradient)


def _watch_model(handle: Watch, model: PreTrainedModel, optimizer: torch.optim.Optimizer | None) -> list[_Call]:
    calls: list[_Call] = []

    def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        _resident(model, optimizer)
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and not t.requires_grad]
        tag("other", inputs)
        asked = kwargs.get("output_router_logits")
        if asked is None:
            asked = getattr(model.config.get_text_config(), "output_router_logits", False)
        calls.append(_Call(kwargs.get("labels") is not None, bool(asked)))

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if calls:
            call = calls.pop()
            handle._pop(call.vocab)
            if call.aux is not None:
                handle._pop(call.aux)
                made("aux", output)

    handle._around(model, before, after)
    if model.base_model is not model:
        handle._bracket(model.base_model, "layer")

        def keep_router_logits(_: nn.Module, args: Any, output: Any) -> None:
            if calls and calls[-1].has_router_loss:
                tag("aux", getattr(output, "router_logits", None))

        handle._hook(model.base_model.register_forward_hook(keep_router_logits))
    return calls


def _watch_head(handle: Watch, model: PreTrainedModel, calls: list[_Call]) -> None:
    head = model.get_output_embeddings()
    if head is None:
        return
    tied = model.get_input_embeddings().weight is getattr(head, "weight", None)
    alone: list[Any] = []  # regions of heads that are called outside of the model's own forward

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        handle.beside_caps["vocab"] = max(handle.beside_caps["vocab"], _beside_vocab(head, tied, args[0]))
        if not calls:
            alone.append(handle._push("vocab"))
        elif calls[-1].vocab is None:
            calls[-1].vocab = handle._push("vocab")

    def after(_: nn.Module, args: Any, output: Any) -> None:
        made("vocab", output)
        if not calls:
            handle._pop(alone.pop() if alone else None)
        elif not calls[-1].has_labels:
            end_vocab()

    def end_vocab() -> None:
        call = calls[-1]
        handle._pop(call.vocab)
        call.vocab = None
        if call.has_router_loss and call.aux is None:
            call.aux = handle._push("aux")

    handle._around(head, before, after)
    stock = model.loss_function
    own = vars(model).get("_loss_function")

    def loss_function(*args: Any, **kwargs: Any) -> Any:
        beside = _beside_divided(args[0] if args else kwargs.get("logits"))
        handle.beside_caps["vocab"] = max(handle.beside_caps["vocab"], beside)
        region = handle._push("vocab")
        try:
            loss = stock(*args, **kwargs)
            made("vocab", loss)
            return loss
        finally:
            handle._pop(region)
            if calls:
                end_vocab()

    def restore() -> None:
        if vars(model).get("_loss_function") is loss_function:  # else somebody has set another since
            del model._loss_function
            if own is not None:
                model.loss_function = own

    model.loss_function = loss_function
    handle._undo.append(restore)


@torch.compiler.disable
def _beside_vocab(head: nn.Module, tied: bool, hidden: torch.Tensor) -> int:
    tokens, weight = hidden.shape[:-1].numel(), getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:  # no head that a cap bounds
        return beside_bytes(tokens, 0, 0)
    if isinstance(weight, DTensor):
        return 0  # see `_beside_divided`
    dtype = None if weight.dtype == torch.float64 else autocast_dtype(hidden.device)
    return beside_bytes(tokens, *weight.shape, hidden=hidden.dtype, weight=weight.dtype, dtype=dtype, tied=tied)


@torch.compiler.disable
def _beside_divided(logits: Any) -> int:
    """Of a head whose weight stays divided. The head itself is not called where FSDP2 would gather it."""
    if not isinstance(logits, DeferredLogits) or logits.source.ring is None or not logits.ready:
        return 0
    hidden, weight = logits.source.operands[:2]
    tokens = hidden.shape[:-1].numel()
    return ring_beside_bytes(tokens, *weight.shape, hidden=hidden.dtype, weight=weight.dtype)


def _watch_checkpoint(handle: Watch, layer: nn.Module, place: str) -> None:
    def before(module: nn.Module, args: Any) -> None:
        if getattr(layer, "gradient_checkpointing", True) and layer.training and torch.is_grad_enabled():
            tag("boundaries", args)

    handle._hook(layer.register_forward_pre_hook(before))

    # The checkpoint replays the layer's forward, not its call: hooks on the layer do not see the recompute.
    def around(function: Callable) -> Callable:
        def region(*inputs: Any, **options: Any) -> Any:
            with component("layer"):
                return function(*inputs, **options)

        return region

    observed = Observed(vars(layer)[place], around)

    def restore() -> None:
        if vars(layer).get(place) is observed:
            setattr(layer, place, observed.function)

    setattr(layer, place, observed)
    handle._undo.append(restore)


def _state(optimizer: torch.optim.Optimizer) -> list[Any]:
    return optimizer.resident_state() if isinstance(optimizer, OffloadStreamAdamW) else list(optimizer.state.values())


def _watch_optimizer(handle: Watch, optimizer: torch.optim.Optimizer) -> None:
    regions: list[Any] = []

    def before(*_: Any) -> None:
        tag("gradients", [p.grad for group in optimizer.param_groups for p in group["params"]])
        regions.append(handle._push("optimizer"))

    def after(*_: Any) -> None:
        tag("optimizer", _state(optimizer))
        handle._pop(regions.pop() if regions else None)

    handle._hook(optimizer.register_step_pre_hook(before))
    handle._hook(optimizer.register_step_post_hook(after))
