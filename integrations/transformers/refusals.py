"""What cannot run beside the schedules, and modules that are left as they are; each with a reason and a way out."""

from __future__ import annotations

import os

from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

__all__ = ["check_launch", "check_model", "why_left_alone"]


def check_model(wrapped: nn.Module, model: PreTrainedModel) -> None:
    """
    Raises:
        `ValueError`: the model is held in a way that the schedules do not support; the message says what to do.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(m, FullyShardedDataParallel) for m in wrapped.modules()):
        raise ValueError(
            "patch_model: FSDP1 flattens parameters; use FSDP2 (fsdp_version: 2 in the accelerate config)."
        )
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        raise ValueError(
            f'patch_model: the model is spread over {sorted(map(str, devices))} by device_map="auto"; load it without'
            " device_map and let accelerate place it."
        )
    check_launch()


def check_launch() -> None:
    """
    Raises:
        `ValueError`: the launch uses DeepSpeed, or asks for context parallelism.
    """
    if is_deepspeed_zero3_enabled() or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true":
        raise ValueError(
            "hf_longmoe does not run under DeepSpeed; launch with DDP or FSDP2 (see accelerate_configs/)."
        )
    for kind in ("CP", "SP"):
        size = int(os.environ.get(f"PARALLELISM_CONFIG_{kind}_SIZE", "1"))
        if size > 1:
            raise ValueError(
                f"The launch asks for {kind.lower()}_size={size} (ParallelismConfig), which hf_longmoe does not take"
                f" yet; set {kind.lower()}_size to 1."
            )


def why_left_alone(name: str, module: nn.Module) -> str | None:
    """Why an experts module, an MLP or a head is not patched; `None` if it can be."""
    if "base_layer" in name.split(".") or type(module).__module__.startswith("peft."):
        return "an adapter wraps it; put adapters on other modules, or merge them first"
    if parametrize.is_parametrized(module):
        return "its weights are parametrized"
    bad = [n for n, p in module.named_parameters() if not p.is_floating_point() or p.element_size() < 2]
    if bad:
        return (
            f"its weights are quantised ({bad[0]} is {dict(module.named_parameters())[bad[0]].dtype}); load it in bf16"
        )
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules()):
        return "it has dropout, which a second run in backward would draw anew"
    if "forward" in vars(module):
        return "something else replaced its forward (expert parallelism does)"
    return None
