"""The patched model's own `forward`: decides, call by call, what is deferred and what is streamed."""

from __future__ import annotations

import dataclasses
import inspect
from functools import wraps
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput, logging

from hf_longmoe.integrations.transformers.refusals import check_launch
from hf_longmoe.peaks import component

__all__ = ["patch_forward", "restore_model_forward"]

logger = logging.get_logger(__name__)
_BYPASSED = (
    "The loss was computed without the patched LM head, so its memory is not bounded: something replaced the model's"
    " forward after patch_model (use_liger_kernel=True does, inside train()). Switch that off, or patch with"
    " LongMoEConfig(vocab=None)."
)


def patch_forward(model: PreTrainedModel) -> None:
    # Accelerate may already have put its own wrapper on the instance: then that is what this one calls.
    model.longmoe_stock_forward = vars(model).get("forward")
    stock = type(model).forward

    @wraps(stock)  # the Trainer reads the signature
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, *args, **kwargs)

    # Compiled models: this frame runs as it is, what it calls is compiled.
    model.forward = MethodType(torch.compiler.disable(forward, recursive=False), model)


def restore_model_forward(model: PreTrainedModel) -> None:
    vars(model).pop("forward", None)
    stock = vars(model).pop("longmoe_stock_forward", None)
    if stock is not None:
        model.forward = stock


def _forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    patch, head = model.longmoe, model.longmoe.head
    if model.training and not patch.launch_checked:
        check_launch()
        patch.launch_checked = True
    stock = model.longmoe_stock_forward or MethodType(type(model).forward, model)
    inputs = _by_name(model, args, kwargs)
    training = model.training and torch.is_grad_enabled()
    if inputs.get("labels") is None or not (training or not torch.is_grad_enabled()):
        return stock(**inputs)
    router_loss = patch.router_loss
    if router_loss is not None and not (training and _wants_router_loss(model, inputs)):
        router_loss = None
    if router_loss is not None:
        router_loss.start(inputs.get("attention_mask"))
        inputs["output_router_logits"] = False
    if head is not None:
        head.deferring, head.loss_computed, head.fallback = True, False, None
    try:
        output = stock(**inputs)
        if head is not None and not head.loss_computed:
            _explain(model, head)
        return output if router_loss is None else _add_router_loss(output, router_loss)
    finally:
        if head is not None:
            head.deferring = False
        if router_loss is not None:
            router_loss.stop()


def _by_name(model: PreTrainedModel, args: tuple, kwargs: dict) -> dict[str, Any]:
    if not args:
        return dict(kwargs)
    bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
    named = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(parameter.name, {}))
    named.pop("self")
    return named


def _wants_router_loss(model: PreTrainedModel, inputs: dict[str, Any]) -> bool:
    asked = inputs.get("output_router_logits")
    asked = model.config.output_router_logits if asked is None else asked
    mask = inputs.get("attention_mask")
    return bool(asked) and inputs.get("return_dict") is not False and (mask is None or torch.is_tensor(mask))


def _add_router_loss(output: ModelOutput, router_loss: Any) -> ModelOutput:
    with component("aux"):
        aux_loss = router_loss.value()
        loss = output.loss + router_loss.coefficient * aux_loss.to(output.loss.device)
    values = {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}
    return type(output)(**{**values, "loss": loss, "aux_loss": aux_loss})


def _explain(model: PreTrainedModel, head: Any) -> None:
    """The loss did not come from the schedule: says why, once, and in the report."""
    if head.fallback is None:
        raise RuntimeError(_BYPASSED)
    entries = model.longmoe.entries
    for at, entry in enumerate(entries):
        if entry.component == "vocab" and entry.schedule is not None:
            entries[at] = dataclasses.replace(entry, schedule=None, note=head.fallback)
            logger.warning(f"{entries[at]}: the stock loss is used, and its memory is not bounded.")
