"""Which modules of a Transformers model the component `dispatch` is made of. Found by interface and by place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longmoe.integrations.transformers.expert_parallel import pipelined
from hf_longmoe.integrations.transformers.experts import block_name, block_of, is_experts, runs_in_waves

__all__ = ["PARTS", "DispatchModule", "dispatch_modules"]

# Of `dispatch`, beside experts. Each part's peak is a line in the tokens; the largest of two is not.
PARTS = ("shared", "dense")


@dataclass(frozen=True)
class DispatchModule:
    """
    A module that belongs to `dispatch`.

    Arguments:
        module: a MoE block, or what stands in one: experts, shared experts; or a dense MLP.
        within: the component of what it stands in.
        capped: whether a cap bounds it. That is so for each experts module, shared expert and dense MLP alone, and not
            for the rest of a block (the router, sums of outputs).
        shares_input: whether its input goes to shared experts too.
        part: of `dispatch`: "shared" experts, "dense" MLPs, "" for experts and for a whole block.
    """

    module: nn.Module
    within: str = "layer"
    capped: bool = True
    shares_input: bool = False
    part: str = ""

    def beside_cap(self, args: Any) -> int:
        """
        Bytes of a call with these arguments that the schedules leave out of their cap.

        Experts: 24 a row; in half precision one expert's float32 gradients; through the model's own kernel the weight
        gradients that autograd returns (`ModelKernel.beside_rows`); and the gradient of an input that others share,
        which is gone as soon as it is added to theirs, so that it does not look like something left behind.
        Shared experts and dense MLPs: one set of their gradients in float32.
        """
        parameters = list(self.module.parameters())
        if not is_experts(self.module):
            return sum(4 * p.numel() for p in parameters)
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        rows = sum(t.numel() for t in tensors if not t.is_floating_point())
        gradients = sum(4 * p[0].numel() for p in parameters if p.itemsize < 4 and p.dim() == 3)
        if (exchange := pipelined(self.module)) is not None:
            gradients = exchange.beside_budget()
        elif (schedule := vars(self.module).get("longmoe_schedule")) is not None:
            block, params = block_of(self.module, self.module.longmoe_kernel)
            gradients += block.beside_rows(params, schedule.budget)
        return 24 * rows + gradients + (tensors[0].nbytes if self.shares_input else 0)


def dispatch_modules(model: PreTrainedModel) -> list[DispatchModule]:
    """Experts by interface, shared experts by name beside them, dense MLPs by where other layers have MoE blocks."""
    found: list[DispatchModule] = []
    layers = {name: m for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}
    stacks: dict[str, set[str]] = {}  # where MoE layers stand -> the names of the blocks in them
    for name, module in model.named_modules():
        if runs_in_waves(module):
            capped = is_experts(module)  # of the others, their adapters' part has no cap
            parent = model.get_submodule(block_name(name))
            shared = [m for child, m in parent.named_children() if "shared" in child]
            if isinstance(parent, GradientCheckpointingLayer):
                found.append(DispatchModule(module, capped=capped))
                found += [DispatchModule(m, part="shared") for m in shared]
            else:
                found.append(DispatchModule(parent, capped=False))
                found.append(DispatchModule(module, within="dispatch", capped=capped, shares_input=bool(shared)))
                found += [DispatchModule(m, within="dispatch", part="shared") for m in shared]
            for layer_name, layer in layers.items():
                if name.startswith(f"{layer_name}."):
                    block = name.removeprefix(f"{layer_name}.").partition(".")[0]
                    stacks.setdefault(layer_name.rpartition(".")[0], set()).add(block)
                    if layer is not parent:
                        beside = [m for child, m in layer.named_children() if "shared" in child]
                        found += [DispatchModule(m, part="shared") for m in beside]
    for layer_name, layer in layers.items():
        blocks = stacks.get(layer_name.rpartition(".")[0], set())
        if blocks and not any(map(runs_in_waves, layer.modules())):
            found += [DispatchModule(m, part="dense") for child, m in layer.named_children() if child in blocks]
    return found
