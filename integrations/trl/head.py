"""The LM head of TRL's trainers through the vocabulary schedule.

TRL (1.16) gives its models a second way to be called, `model(..., labels=labels, fused_lm_head=True)`, which answers
with a `FusedCausalLMOutput`: log-probability, entropy and more of each label. It takes the LM head's weight and works
in tiles of a fixed size. `bound_head` keeps the call and the answer, and has the patched model answer: its own forward
runs, so that scales and soft caps are the model's own, and the caps are those of `LongMoEConfig`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer
from trl.trainer.utils import FusedCausalLMOutput

from hf_longmoe.integrations.transformers.causal_lm import causal_lm
from hf_longmoe.integrations.transformers.head import head_forward
from hf_longmoe.integrations.transformers.patch import patch_model
from hf_longmoe.integrations.transformers.token_values import TokenCall, asked, asking

__all__ = ["bound_head"]

# Fields of `TokenStatistics` by those of the output.
_NAMES = {
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_squares",
    "mean_logits": "mean_logits",
    "is_top1": "correct",
}
# What the trainers read beside log-probabilities; another trainer gets them all.
_READ = {"SFTTrainer": ("entropy", "is_top1"), "DPOTrainer": ("entropy", "mean_logits", "is_top1")}
_READ |= {"GRPOTrainer": ("entropy",), "RLOOTrainer": ("entropy",)}
_GATHERED = "in tiles, for values of single tokens; for these each rank gathers the weight that the ring divides"


def bound_head(trainer: Trainer) -> None:
    """
    Has the models of a TRL trainer, the reference model too, answer through the vocabulary schedule. Once is enough;
    `unpatch_model` gives TRL's own head back. A reference model that is not patched is patched with the same config.

    Arguments:
        trainer (`Trainer`): one of TRL's, that trains a model which `patch_model` has patched.

    Raises:
        `ValueError`: the model is not patched, TRL has given it no such head, or ranks are to share sequences.
    """
    model = causal_lm(trainer.model)
    name = type(trainer).__name__
    if "longmoe" not in vars(model):
        raise ValueError(f"{name}: its model is not patched; call patch_model(model, config) first.")
    parallelism = trainer.accelerator.parallelism_config
    if parallelism is not None and parallelism.cp_size > 1:
        raise ValueError(
            f"{name}: ParallelismConfig(cp_size={parallelism.cp_size}) is not supported, since TRL adds up values of"
            " whole sequences; set cp_size to 1, or use LongMoETrainer."
        )
    options = dict(
        temperature=getattr(trainer, "temperature", 1.0),
        float32=getattr(trainer.args, "cast_lm_head_to_fp32", False),
    )
    _bind(model, _outputs(trainer), **options)
    _take_over(model.get_output_embeddings())
    if model.longmoe.ring is not None:
        entries = model.longmoe.entries
        model.longmoe.entries = [replace(e, note=_GATHERED) if e.component == "vocab" else e for e in entries]
    reference = getattr(trainer, "ref_model", None)
    if isinstance(reference, nn.Module):
        reference = causal_lm(reference)
        lm_head = reference.get_output_embeddings()
        if "longmoe" not in vars(reference):
            if (theirs := _cast(lm_head)) is not None:
                del lm_head.forward
            patch_model(reference, model.longmoe.config)
            if theirs is not None:
                lm_head.forward = theirs
        _bind(reference, (), **options)
        _take_over(lm_head)


def _outputs(trainer: Trainer) -> tuple[str, ...]:
    names = {cls.__name__ for cls in type(trainer).__mro__}
    read = next((read for name, read in _READ.items() if name in names), tuple(_NAMES))
    weighted = getattr(trainer, "use_weighting", False) and "log_sum_sq_probs" not in read  # DPO's
    return (*read, "log_sum_sq_probs") if weighted else read


def _bind(model: PreTrainedModel, outputs: tuple[str, ...], temperature: float, float32: bool) -> None:
    before = model.forward
    if getattr(before, "longmoe_outputs", None) is not None:
        return
    fields = tuple(_NAMES[name] for name in outputs)

    def forward(self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return before(*args, **kwargs)
        if not _bounded(self):
            return before(*args, fused_lm_head=True, **kwargs)
        with asking(TokenCall(fields, temperature, float32)) as call:
            output = before(*args, **{**kwargs, "use_cache": False})
        if call.values is None:  # the loss was not computed from the LM head's logits; the report says so now
            return before(*args, fused_lm_head=True, **kwargs)
        return _output(call, output, kwargs["labels"], kwargs.get("shift_labels"), outputs)

    # Not `wraps`: Accelerate follows `__wrapped__` to take its own wrapper off again.
    forward.__signature__ = inspect.signature(type(model).forward)
    forward.__doc__ = type(model).forward.__doc__
    forward.longmoe_outputs, forward.longmoe_forward = outputs, ()
    model.forward = MethodType(forward, model)


def _cast(lm_head: nn.Module) -> Callable | None:
    """The forward that TRL has put on a head for `cast_lm_head_to_fp32`."""
    forward = vars(lm_head).get("forward")
    return forward if getattr(forward, "__qualname__", "").endswith(".cast_forward_to_fp32") else None


def _take_over(lm_head: nn.Module) -> None:
    """Has that forward run for all calls but those for values."""
    theirs = _cast(lm_head)
    if theirs is None or "longmoe_head" not in vars(lm_head):
        return

    def forward(self: nn.Linear, hidden_states: torch.Tensor) -> torch.Tensor:
        if asked() is None or "longmoe_head" not in vars(self):
            return theirs(hidden_states)
        with torch.autocast(hidden_states.device.type, enabled=False):
            return head_forward(self, hidden_states.float())

    lm_head.forward = MethodType(forward, lm_head)


def _bounded(model: PreTrainedModel) -> bool:
    """Whether the patched model's head answers: it is patched, and no call has shown that it cannot be."""
    patch = vars(model).get("longmoe")
    parts = [] if patch is None or patch.head is None else [e for e in patch.entries if e.component == "vocab"]
    return any(entry.schedule is not None for entry in parts)


def _output(
    call: TokenCall, output: Any, labels: Any, shift_labels: Any, outputs: tuple[str, ...]
) -> FusedCausalLMOutput:
    mask = (labels[:, 1:] if shift_labels is None else shift_labels) != -100

    def cut(values: Any) -> Any:
        # Not a view: FSDP2 hooks what a model returns.
        return (values if shift_labels is not None else values[:, :-1]).clone()

    found = {name: cut(getattr(call.values, _NAMES[name])) for name in outputs}
    aux_loss = getattr(output, "aux_loss", None)
    log_probs = cut(call.values.log_probs)
    return FusedCausalLMOutput(
        loss=output.loss, log_probs=log_probs, label_mask=mask.to(log_probs.device), aux_loss=aux_loss, **found
    )
