"""LoRA on the LM head, and heads that are trained whole beside the stock one (`modules_to_save`)."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from hf_longmoe.integrations.transformers.deferred import current_call, with_low_rank

__all__ = ["HeadAdapters", "head_adapters"]


class HeadAdapters:
    """
    What PEFT has made of an LM head.

    Arguments:
        wrapper: a LoRA layer, whose addition the loss takes as a product of two thin matrices; or a wrapper of copies.
    """

    def __init__(self, wrapper: Linear | ModulesToSaveWrapper) -> None:
        self.wrapper = wrapper

    @property
    def heads(self) -> list[nn.Module]:
        """The one that runs now, then its copies."""
        if isinstance(self.wrapper, Linear):
            return [self.wrapper.base_layer]
        copies = self.wrapper.modules_to_save
        active = [copies[name] for name in self.wrapper.active_adapters if name in copies]
        return list(dict.fromkeys([*active, self.wrapper.original_module, *copies.values()]))

    @property
    def rank(self) -> int:
        """Of all active adapters together."""
        return sum(self.wrapper.r[name] for name in _active(self.wrapper)) if isinstance(self.wrapper, Linear) else 0

    def install(self) -> None:
        if isinstance(self.wrapper, Linear):
            self.wrapper.longmoe_head_adapters = self
            self.wrapper.forward = MethodType(_forward, self.wrapper)

    def remove(self) -> None:
        for name in ("longmoe_head_adapters", "forward"):
            vars(self.wrapper).pop(name, None)

    def __str__(self) -> str:
        return f"LoRA (r={self.rank})" if isinstance(self.wrapper, Linear) else "trained whole beside the stock head"


def head_adapters(lm_head: nn.Module) -> HeadAdapters | str | None:
    """
    Returns:
        `None` if the head is no wrapper of PEFT; why it has to be left alone, if it is one that is not known.
    """
    if isinstance(lm_head, ModulesToSaveWrapper):
        return HeadAdapters(lm_head)
    if not type(lm_head).__module__.startswith("peft."):
        return None
    if type(lm_head) is not Linear or not isinstance(lm_head.base_layer, nn.Linear):
        return f"a {type(lm_head).__name__} of PEFT wraps it, whose sum with the logits is not known"
    if lm_head.lora_variant:
        kinds = sorted({type(variant).__name__ for variant in lm_head.lora_variant.values()})
        return (
            f"a variant of LoRA ({', '.join(kinds)}) is on it, which adds more than B·A to its weight; use plain LoRA"
        )
    if "forward" in vars(lm_head) and "longmoe_head_adapters" not in vars(lm_head):
        return "something else replaced the forward of its adapter"
    return HeadAdapters(lm_head)


def _active(wrapper: Linear) -> list[str]:
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def _forward(self: Linear, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    names = [] if self.disable_adapters or self.merged or args or kwargs else _active(self)
    if current_call() is None or not names or self.lora_variant:
        return type(self).forward(self, x, *args, **kwargs)
    logits = self.base_layer(x)
    u, v, bias = [], [], None
    for name in names:
        a, b, scale = self.lora_A[name], self.lora_B[name], self.scaling[name]
        u.append(a(self.lora_dropout[name](self._cast_input_dtype(x, a.weight.dtype))) * scale)
        v.append(b.weight)
        if b.bias is not None:
            bias = b.bias * scale if bias is None else bias + b.bias * scale
    one = len(names) == 1
    return with_low_rank(logits, u[0] if one else torch.cat(u, -1), v[0] if one else torch.cat(v, 1), bias)
