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
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.distributed.tensor import DTensor

from hf_longmoe.integrations.peft.sharded import ExpertRanks, divide, expert_ranks
from hf_longmoe.integrations.transformers.by_token import is_adapter
from hf_longmoe.integrations.transformers.causal_lm import causal_lm
from hf_longmoe.integrations.transformers.expert_parallel import is_expert_parallel
from hf_longmoe.integrations.transformers.experts import is_experts
from hf_longmoe.schedules.dispatch import LowRank

__all__ = ["ExpertAdapters", "adapter_state_dict", "expert_adapters", "shard_adapters"]

_STACKED = ("gate_up_proj", "up_proj", "down_proj")


class ExpertAdapters:
    """
    The wrappers around one experts module; called, what they add to its weights here and now.

    Arguments:
        wrappers: the outermost first.
        ranks: that the experts are divided over, if they are.
    """

    def __init__(self, wrappers: Sequence[ParamWrapper], ranks: ExpertRanks | None = None) -> None:
        self.wrappers, self.ranks = tuple(wrappers), ranks
        self._lent: list[tuple[ParamWrapper, Sequence[str]]] = []  # by the wrappers of a call that is running

    def __call__(self) -> dict[str, list[LowRank]]:
        return self._additions(self._lent)

    def active(self) -> dict[str, list[LowRank]]:
        """What a call would add, as adapters are set now."""
        usable = (w for w in reversed(self.wrappers) if not (w.disable_adapters or w.merged))
        return self._additions([(wrapper, wrapper.active_adapters) for wrapper in usable])

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

    def _additions(self, given: Sequence[tuple[ParamWrapper, Sequence[str]]]) -> dict[str, list[LowRank]]:
        found: dict[str, list[LowRank]] = {}
        for wrapper, names in given:
            for name in names:
                if name in wrapper.lora_A:
                    found.setdefault(wrapper.parameter_name, []).append(self._low_rank(wrapper, name))
        return found

    def _low_rank(self, wrapper: ParamWrapper, name: str) -> LowRank:
        """Views of PEFT's `A [r·E, in]`, experts first, and `B [out, r·E]`, experts last."""
        a, b, experts = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
        if self.ranks is not None:
            a, b = self.ranks.part(a, experts, last=False), self.ranks.part(b, experts, last=True)
            experts //= self.ranks.size
        by_expert: torch.Tensor = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
        return LowRank(a.reshape(experts, -1, a.shape[1]), by_expert, float(wrapper.scaling[name]))

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
    if not is_experts(experts):  # its weights are read by an adapter of ours, past what PEFT does to them
        on = [w.parameter_name for w in wrappers]
        on += [name for name, m in experts.named_modules() if is_adapter(m)]
        return f"an adapter is on its {on[0]}; of these experts no schedule runs one" if on else None
    if not wrappers:
        return None
    found = ExpertAdapters(wrappers, expert_ranks(model) if is_expert_parallel(experts) else None)
    return found.why_not(experts) or found


def shard_adapters(model: nn.Module) -> nn.Module:
    """
    Divides LoRA's factors of expert-parallel experts over the ranks, as the experts are: each rank keeps those of its
    own. To be called on every rank, after `get_peft_model` (and after another adapter was added) and before an
    optimizer is made. The first rank's values count.

    Arguments:
        model: a `PeftModel` of a model that was loaded with `DistributedConfig(ep_size=...)`.

    Returns:
        The same object. `save_pretrained`, to be called on every rank (with `is_main_process` on one), writes a plain
        adapter, and `load_adapter` takes one; see `adapter_state_dict`.

    Raises:
        `ValueError`: there are no such factors.
    """
    target, count = causal_lm(model), 0
    for name, experts in target.named_modules():
        adapters = expert_adapters(target, name) if is_experts(experts) and is_expert_parallel(experts) else None
        if isinstance(adapters, ExpertAdapters):
            for wrapper in adapters.wrappers:
                for adapter in wrapper.lora_A:
                    divide(wrapper, adapter, getattr(experts, wrapper.parameter_name).device_mesh, adapters.ranks)
                    count += 1
    if not count:
        raise ValueError(
            f"shard_adapters: model={type(model).__name__} has no LoRA on experts that expert parallelism divides;"
            ' load it with DistributedConfig(ep_size=...) and give LoraConfig(target_parameters=["mlp.experts'
            '.gate_up_proj", "mlp.experts.down_proj"]).'
        )
    return model


# Stands in for `ParamWrapper._activate_lora`, which registers a parametrization for the length of the call.
def _lend(self: ParamWrapper, active_adapters: Sequence[str]):
    return self.longmoe_adapters.lent(self, active_adapters)


def adapter_state_dict(model: PeftModel) -> dict[str, torch.Tensor]:
    """
    What `model.save_pretrained(folder, state_dict=...)` needs of a model that was sharded at load: adapters, and
    modules that are saved whole, each gathered by itself. Without it PEFT gathers the whole model on every rank.

    To be called on every rank.
    """
    kinds = (model.base_model.prefix, "modules_to_save.", "trainable_tokens_")
    found = {name: value for name, value in model.state_dict().items() if any(kind in name for kind in kinds)}
    for name, value in found.items():
        found[name] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
    return found
