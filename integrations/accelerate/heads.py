"""The LM head under Accelerate's own FSDP2, in a group of its own: so that no rank gathers it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from transformers import PreTrainedModel

from hf_longmoe.config import LongMoEConfig
from hf_longmoe.integrations.transformers.patch import Patch, patch_model, unpatch_model
from hf_longmoe.integrations.transformers.ring_head import divide_head

__all__ = ["divide_heads", "repatch"]


def divide_heads(accelerator: Accelerator, config: LongMoEConfig, args: Iterable[Any]) -> list[PreTrainedModel]:
    """
    Before Accelerate shards the models among `args`: gives those heads that the ring can serve a group of their own.
    Optimizers among `args` get the head's new parameters.

    Returns:
        The models whose head it has divided.
    """
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is None or isinstance(plugin.cpu_offload, CPUOffloadPolicy) or plugin.cpu_ram_efficient_loading:
        return []  # a head on the host cannot be used there; weights that come later would be lost
    divided = []
    for model in args:
        lm_head = _divisible(model, config)
        if lm_head is None:
            continue
        if accelerator.mixed_precision != "no":  # as Accelerate is about to do with all trainable parameters
            for param in lm_head.parameters():
                param.data = param.data.float() if param.requires_grad else param.data
        mesh = getattr(accelerator, "torch_device_mesh", None)
        replaced = divide_head(
            lm_head,
            mesh=None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
            mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        )
        for optimizer in args:
            if isinstance(optimizer, torch.optim.Optimizer):
                for group in optimizer.param_groups:
                    group["params"][:] = [replaced.get(param, param) for param in group["params"]]
        divided.append(model)
    return divided


def _divisible(model: Any, config: LongMoEConfig) -> nn.Module | None:
    if not isinstance(model, PreTrainedModel) or isinstance(model, FSDPModule):
        return None
    lm_head, patch = model.get_output_embeddings(), _patch(model)
    vocab = config.vocab if patch is None or patch.head is None else patch.config.vocab
    wanted = vocab is not None and (vocab.schedule == "ring" or vocab.schedule == "auto" and patch is not None)
    if not wanted or not isinstance(lm_head, nn.Linear) or isinstance(lm_head, FSDPModule):
        return None
    return None if lm_head.weight is model.get_input_embeddings().weight else lm_head


def repatch(model: PreTrainedModel) -> None:
    """`patch_model` once more, now that the head is divided."""
    patch = _patch(model)
    if patch is not None:
        unpatch_model(model)
        patch_model(model, patch.config)


def _patch(model: PreTrainedModel) -> Patch | None:
    return vars(model).get("longmoe")
