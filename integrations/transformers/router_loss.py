"""The router's auxiliary loss, streamed: each layer adds its sums as it runs, and no layer's logits are collected.

The stock models capture the logits of every layer (`output_router_logits`) and reduce them at the end. Here the
capture is switched off for the call, a hook on each router reduces its logits at once, and the loss is added after.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from hf_longmoe.schedules.aux import RouterSums, load_balancing_loss, router_sums, sums_over_ranks
from hf_longmoe.schedules.replay import recall, replaying
from hf_longmoe.schedules.wire import Wire

__all__ = ["RouterLoss", "router_loss_of"]


@dataclass
class RouterLoss:
    """
    One model's auxiliary loss.

    Arguments:
        model: whose it is.
        index: of the logits, `[T, E]`, in a router's output.
        num_experts, top_k: as the model passes them to `load_balancing_loss_func`.
    """

    model: PreTrainedModel = field(repr=False, compare=False)
    index: int
    num_experts: int
    top_k: int
    collecting: bool = False
    mask: torch.Tensor | None = None
    ranks: Wire | None = None
    sums: list[RouterSums] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> RouterLoss:
        """With its model. A router alone is copied by PEFT (`modules_to_save`), and the copy's logits belong here."""
        if id(self.model) not in memo:
            return self
        values = {f.name: copy.deepcopy(getattr(self, f.name), memo) for f in dataclasses.fields(self)}
        memo[id(self)] = RouterLoss(**values)
        return memo[id(self)]

    def start(self, attention_mask: torch.Tensor | None, ranks: Wire | None = None) -> None:
        """
        From here on the routers' logits are summed; `attention_mask` `[B, S]` leaves out padding. With `ranks` that
        share sequences, the loss will be that of the whole sequences, on each of them.
        """
        self.sums, self.collecting, self.ranks = [], True, ranks
        self.mask = None if attention_mask is None else attention_mask.reshape(-1)

    def stop(self) -> None:
        self.sums, self.mask, self.collecting, self.ranks = [], None, False, None

    def hook(self, router: nn.Module, args: Any, output: Any) -> None:
        # A replay must build the graph of its first pass, whatever the model is doing by then.
        collecting, mask = recall(lambda: (self.collecting, self.mask), shared=True)
        if collecting:
            logits = output[self.index] if isinstance(output, (tuple, list)) else output
            with torch._C.DisableTorchFunction():  # the loss's own top-k needs no pinning: nothing is routed by it
                sums = router_sums(logits.reshape(-1, logits.shape[-1]), self.top_k, mask)
            if not replaying():
                self.sums.append(sums)

    def value(self) -> torch.Tensor:
        sums = self.sums if self.ranks is None else [sums_over_ranks(self.sums, self.ranks)]
        return load_balancing_loss(sums, self.num_experts)


def router_loss_of(model: PreTrainedModel) -> tuple[RouterLoss, list[nn.Module]] | None:
    """The auxiliary loss of a model that computes one the standard way, with its routers; else `None`."""
    # Of all bases: FSDP2 gives a model a class of its own.
    modules = (sys.modules.get(base.__module__) for base in type(model).__mro__)
    if not any(hasattr(module, "load_balancing_loss_func") for module in modules):
        return None
    sizes = [getattr(model, name, None) for name in ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")]
    recorders = [m._can_record_outputs.get("router_logits") for m in model.modules() if _records(m)]
    if None in sizes or not recorders:
        return None
    recorder = recorders[0]
    target, index = (recorder.target_class, recorder.index) if isinstance(recorder, OutputRecorder) else (recorder, 0)
    routers = [m for m in model.modules() if isinstance(m, target)]
    return (RouterLoss(model, index, *sizes[:2]), routers) if routers else None


def _records(module: nn.Module) -> bool:
    return isinstance(module, PreTrainedModel) and "router_logits" in (module._can_record_outputs or {})
