"""The patched model's own `forward`: decides, call by call, what is deferred and what is streamed."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput, logging

from hf_longmoe.integrations.transformers.adapters import adopt_adapters
from hf_longmoe.integrations.transformers.checkpoint_function import checkpointing_of, wrap_checkpointing
from hf_longmoe.integrations.transformers.deferred import DeferredLogits, LossCall
from hf_longmoe.integrations.transformers.expert_parallel import replaced_implementations
from hf_longmoe.integrations.transformers.experts import replaced_schedules
from hf_longmoe.integrations.transformers.refusals import check_launch, check_shared_batch
from hf_longmoe.integrations.transformers.ring_head import stand_in
from hf_longmoe.peaks import component
from hf_longmoe.schedules.wire import Wire

__all__ = ["patch_forward", "restore_model_forward", "wants_router_loss"]

logger = logging.get_logger(__name__)
_REPLACED = (
    "{what} was replaced after patch_model (use_liger_kernel=True does so, inside train(); TRL's trainers do, as they"
    " are made: use LongMoESFTTrainer and the others of hf_longmoe.integrations.trl), so its memory is not bounded."
    " Switch that off, or make the replacement first and call patch_model after it."
)
_NEW_HEAD = "the model calls another than was patched (of resize_token_embeddings, say); call patch_model once more"
_REPLICA = (
    "A patched model cannot run as a replica: torch.nn.DataParallel, which a Trainer uses where one process sees"
    " several devices, is not supported. Start one process a device, with `accelerate launch`."
)


def patch_forward(model: PreTrainedModel) -> None:
    model.longmoe.handles.append(model.register_forward_pre_hook(_refuse_replica))
    if model.base_model is not model:
        # There, since PEFT calls `forward` and not the model. A bound method is copied with the model that it checks.
        model.longmoe.handles.append(model.base_model.register_forward_pre_hook(MethodType(_refuse_replaced, model)))
    if _leads_here(model):  # left by an unpatching inside somebody's wrapper
        return
    # Accelerate may already have put its own wrapper on the instance: then that is what this one calls.
    model.longmoe_stock_forward = vars(model).get("forward")

    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        patch = vars(self).get("longmoe")
        if patch is None:
            return _stock_forward(self)(*args, **kwargs)
        inside, patch.inside = patch.inside, True
        try:
            return _forward(self, *args, **kwargs)
        finally:
            patch.inside = inside

    # The Trainer reads the signature. Not `wraps`: Accelerate follows `__wrapped__` to take its own wrapper off again,
    # and would take this one off too.
    forward.__signature__ = inspect.signature(type(model).forward)
    forward.__doc__ = type(model).forward.__doc__
    outer = torch.compiler.disable(forward, recursive=False)
    forward.longmoe_forward = outer.longmoe_forward = (forward, outer)
    model.forward = MethodType(outer, model)


def restore_model_forward(model: PreTrainedModel) -> None:
    forward = getattr(model.forward, "__func__", None)
    # Where Accelerate has wrapped it since, or Liger replaced it, what is there stays.
    if forward in getattr(forward, "longmoe_forward", ()):
        del model.forward
        stock = vars(model).pop("longmoe_stock_forward")
        if stock is not None:
            model.forward = stock


def _leads_here(model: PreTrainedModel) -> bool:
    """Whether `model.forward` is the patched one or a wrapper around it."""

    def ours(forward: Callable) -> bool:
        return hasattr(forward, "longmoe_forward")

    return ours(inspect.unwrap(model.forward, stop=ours))


def _stock_forward(model: PreTrainedModel) -> Callable:
    return model.longmoe_stock_forward or MethodType(type(model).forward, model)


@torch.compiler.disable
def _refuse_replica(model: nn.Module, args: Any) -> None:
    if model.longmoe.model is not model:
        raise ValueError(_REPLICA)


@torch.compiler.disable
def _refuse_replaced(model: PreTrainedModel, base_model: nn.Module, args: Any) -> None:
    if model.training and torch.is_grad_enabled() and not model.longmoe.inside:
        if not _leads_here(model):
            raise RuntimeError(_REPLACED.format(what=f"The forward of {type(model).__name__}"))


# This frame runs as it is; the stock forward, which it calls, is compiled.
@torch.compiler.disable(recursive=False)
def _forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    patch = model.longmoe
    stock = _stock_forward(model)
    training = model.training and torch.is_grad_enabled()
    inputs = _by_name(model, args, kwargs)
    if training and not patch.launch_checked:
        _check_first_step(model, inputs or {})
    if inputs is None or inputs.get("labels") is None or not (training or not torch.is_grad_enabled()):
        return stock(*args, **kwargs)
    router_loss, ranks = patch.router_loss, _sharing(model)
    # In evaluation the stock loss is as good, but where each rank has a part of the tokens.
    if router_loss is not None and not ((training or ranks is not None) and wants_router_loss(model, inputs)):
        router_loss = None
    if router_loss is not None:
        router_loss.start(inputs.get("attention_mask"), ranks)
        inputs["output_router_logits"] = False
    try:
        output = stock(**inputs) if patch.head is None else _deferring(model, training, stock, inputs)
        return output if router_loss is None else _add_router_loss(model, output, router_loss)
    finally:
        if router_loss is not None:
            router_loss.stop()


@torch.compiler.disable
def _check_first_step(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    check_launch(training=model)
    check_shared_batch(model, inputs.get("input_ids"))
    adopt_adapters(model.longmoe)
    for name in (*replaced_schedules(model), *replaced_implementations(model)):
        raise RuntimeError(_REPLACED.format(what=f"The forward of {name}"))
    wrap_checkpointing(model, checkpointing_of(model))  # Accelerate's FSDP2 wraps layers in `prepare`
    model.longmoe.launch_checked = True


@torch.compiler.disable(recursive=False)
def _deferring(model: PreTrainedModel, training: bool, stock: Any, inputs: dict[str, Any]) -> Any:
    call = LossCall(training)
    call.begin()
    try:
        with stand_in(model, model.longmoe.head, model.longmoe.ring):
            output = stock(**inputs)
        return _settled(model, call, output)
    finally:
        call.end()


@torch.compiler.disable
def _settled(model: PreTrainedModel, call: LossCall, output: Any) -> Any:
    """The output, with something in it for logits that were not formed; and the report corrected, where they were."""
    if call.training and (call.fallback is not None or not call.loss_computed or not call.sources):
        _leave_head_alone(model, call)
    if isinstance(output, tuple):
        return tuple(value.settled() if isinstance(value, DeferredLogits) else value for value in output)
    for name, value in output.items() if isinstance(output, dict) else ():
        if isinstance(value, DeferredLogits):
            output[name] = value.settled()
    return output


@torch.compiler.disable
def _by_name(model: PreTrainedModel, args: tuple, kwargs: dict) -> dict[str, Any] | None:
    """The call's arguments by name; `None` where they do not fit the signature."""
    if not args:
        return dict(kwargs)
    parameters = inspect.signature(type(model).forward).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1 : 1 + len(args)]
    if len(names) < len(args) or kwargs.keys() & set(names):
        return None
    return dict(zip(names, args, strict=True)) | kwargs


@torch.compiler.disable
def _sharing(model: PreTrainedModel) -> Wire | None:
    """The ranks that share the sequences of this call, if they do."""
    sequences = vars(model).get("longmoe_sequences")
    return sequences.wire if sequences is not None and sequences.inside else None


@torch.compiler.disable
def wants_router_loss(model: PreTrainedModel, inputs: dict[str, Any]) -> bool:
    """Whether this call is to add the auxiliary loss to its own."""
    asked = inputs.get("output_router_logits")
    if asked is None:  # a field of the text part's, in a multimodal model
        asked = getattr(model.config.get_text_config(), "output_router_logits", False)
    mask = inputs.get("attention_mask")
    return bool(asked) and inputs.get("return_dict") is not False and (mask is None or torch.is_tensor(mask))


@torch.compiler.disable
def _add_router_loss(model: PreTrainedModel, output: ModelOutput, router_loss: Any) -> ModelOutput:
    with component("aux"):
        aux_loss = router_loss.value()
        loss = output.loss + model.router_aux_loss_coef * aux_loss.to(output.loss.device)
    values = {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}
    return type(output)(**{**values, "loss": loss, "aux_loss": aux_loss})


def _leave_head_alone(model: PreTrainedModel, call: LossCall) -> None:
    """The loss did not come from the schedule: says why, once, and in the report."""
    config = model.longmoe.config.vocab
    if not call.loss_computed and (config.label_smoothing or config.z_loss):
        raise ValueError(
            f"vocab.label_smoothing={config.label_smoothing} and vocab.z_loss={config.z_loss} cannot be applied to"
            f" {type(model).__name__}, which does not call its loss_function; set both to 0."
        )
    reason = _NEW_HEAD if call.loss_computed else "the model computes its loss without calling its LM head"
    model.longmoe.leave_head_alone(call.fallback or reason)
