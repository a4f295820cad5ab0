"""LoRA on an experts module's stacked weights (`target_parameters` of PEFT), handed to the schedule as factors.

PEFT wraps the module in one `ParamWrapper` for each parameter, and parametrizes it around a call: `W + s·B·A` of all
experts is formed. Here a wrapper lends its factors for the length of the call instead, and the schedule applies them
expert by expert. What else a wrapper does (merged, disabled, several adapters) stays PEFT's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from hf_longmoe.schedules.dispatch import LowRank

__all__ = ["ExpertAdapters", "expert_adapters"]

_STACKED = ("gate_up_proj", "up_proj", "down_proj")


class ExpertAdapters:
    """
    The wrappers around one experts module; called, what they add to its weights here and now.

    Arguments:
        wrappers: the outermost first.
    """

    def __init__(self, wrappers: Sequence[ParamWrapper]) -> None:
        self.wrappers = tuple(wrappers)
        self._lent: list[tuple[ParamWrapper, Sequence[str]]] = []  # by the wrappers of a call that is running

    def __call__(self) -> dict[str, list[LowRank]]:
        return _additions(self._lent)

    def active(self) -> dict[str, list[LowRank]]:
        """What a call would add, as adapters are set now."""
        usable = (w for w in reversed(self.wrappers) if not (w.disable_adapters or w.merged))
        return _additions([(wrapper, wrapper.active_adapters) for wrapper in usable])

    def why_not(self, experts: nn.Module) -> str | None:
        """Why the schedule cannot take these adapters over; `None` if it can."""
        for wrapper in self.wrappers:
            if type(wrapper).forward is not ParamWrapper.forward or "forward" in vars(wrapper):
                return f"something else replaced the forward of its {type(wrapper).__name__}"
            param = getattr(experts, wrapper.parameter_name)
            if wrapper.parameter_name not in _STACKED or param.dim() != 3:
                return (
                    f"an adapter is on {wrapper.parameter_name}, which is none of {', '.join(_STACKED)}; target those"
                )
        return None

    def install(self, experts: nn.Module) -> None:
        experts.longmoe_adapters = self
        for wrapper in self.wrappers:
            wrapper.longmoe_adapters = self
            wrapper._activate_lora = MethodType(_lend, wrapper)

    def remove(self) -> None:
        for wrapper in self.wrappers:
            for name in ("longmoe_adapters", "_activate_lora"):
                vars(wrapper).pop(name, None)

    @contextmanager
    def lent(self, wrapper: ParamWrapper, names: Sequence[str]) -> Iterator[None]:
        self._lent.append((wrapper, tuple(names)))
        try:
            yield
        finally:
            self._lent.pop()

    def __str__(self) -> str:
        found = self.active()
        each = (f"{name} (r={', '.join(str(added.a.shape[1]) for added in found[name])})" for name in found)
        return f"LoRA by expert on {', '.join(each)}" if found else "no adapter active"


def expert_adapters(model: nn.Module, name: str) -> ExpertAdapters | str | None:
    """
    What wraps the experts module of this name.

    Returns:
        `None` if no adapter does; why the module has to be left alone, if one does that the schedule does not know.
    """
    experts, wrappers = model.get_submodule(name), []
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
        wrapper = model.get_submodule(name)
        if not isinstance(wrapper, ParamWrapper):
            return f"a {type(wrapper).__name__} of PEFT wraps it; of PEFT's, LoRA's target_parameters are known"
        wrappers.insert(0, wrapper)
    if not wrappers:
        return None
    found = ExpertAdapters(wrappers)
    return found.why_not(experts) or found


# Stands in for `ParamWrapper._activate_lora`, which registers a parametrization for the length of the call.
def _lend(self: ParamWrapper, active_adapters: Sequence[str]):
    return self.longmoe_adapters.lent(self, active_adapters)


def _additions(given: Sequence[tuple[ParamWrapper, Sequence[str]]]) -> dict[str, list[LowRank]]:
    found: dict[str, list[LowRank]] = {}
    for wrapper, names in given:
        for name in names:
            if name in wrapper.lora_A:
                found.setdefault(wrapper.parameter_name, []).append(_low_rank(wrapper, name))
    return found


def _low_rank(wrapper: ParamWrapper, name: str) -> LowRank:
    """Views of PEFT's `A [r·E, in]`, experts first, and `B [out, r·E]`, experts last."""
    a, b, experts = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    by_expert: torch.Tensor = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    return LowRank(a.reshape(experts, -1, a.shape[1]), by_expert, float(wrapper.scaling[name]))
