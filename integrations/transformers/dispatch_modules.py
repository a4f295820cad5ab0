"""Which modules of a Transformers model the component `dispatch` is made of. Found by interface and by place."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longmoe.integrations.transformers.experts import is_experts

__all__ = ["dispatch_modules"]


def dispatch_modules(model: PreTrainedModel) -> list[tuple[nn.Module, bool]]:
    """
    The modules that belong to `dispatch`, and whether each is the outermost such. Experts and shared experts get
    regions of their own inside the block's: a cap bounds each of these alone, and not the router beside them. Dense
    layers are read off the MoE layers beside them.
    """
    found: dict[nn.Module, bool] = {}
    layers = {name: m for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}
    stacks: dict[str, set[str]] = {}  # where MoE layers stand -> the names of the blocks in them
    for name, module in model.named_modules():
        if is_experts(module):
            parent = model.get_submodule(name.rpartition(".")[0])
            inside = not isinstance(parent, GradientCheckpointingLayer)
            if inside:
                found[parent] = True
                found.update((m, False) for child, m in parent.named_children() if "shared" in child)
            found[module] = not inside
            for layer_name, layer in layers.items():
                if name.startswith(f"{layer_name}."):
                    block = name.removeprefix(f"{layer_name}.").partition(".")[0]
                    stacks.setdefault(layer_name.rpartition(".")[0], set()).add(block)
                    found.update((m, True) for child, m in layer.named_children() if "shared" in child)
    for layer_name, layer in layers.items():
        blocks = stacks.get(layer_name.rpartition(".")[0], set())
        if blocks and not any(map(is_experts, layer.modules())):
            found.update((m, True) for child, m in layer.named_children() if child in blocks)
    return list(found.items())
