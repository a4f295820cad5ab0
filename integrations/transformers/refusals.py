"""What cannot run beside the schedules, and modules that are left as they are; each with a reason and a way out."""

from __future__ import annotations

import inspect
import math
import os

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hf_longmoe.config import LongMoEConfig
from hf_longmoe.integrations.ringmaster import check_ringmaster
from hf_longmoe.integrations.transformers.by_token import why_not_by_token
from hf_longmoe.integrations.transformers.causal_lm import causal_lm
from hf_longmoe.schedules.wire import GroupWire

__all__ = ["check_expert_dtype", "check_launch", "check_model", "check_shared_batch", "check_tied", "why_left_alone"]

_FSDP1 = "hf_longmoe: FSDP1 flattens parameters; use FSDP2 (fsdp_version: 2 in the accelerate config)."


def check_model(wrapped: nn.Module, model: PreTrainedModel, config: LongMoEConfig) -> None:
    """
    Raises:
        `ValueError`: the model is held in a way that the schedules do not support; the message says what to do.
    """
    if any(isinstance(m, FullyShardedDataParallel) for m in wrapped.modules()):
        raise ValueError(_FSDP1)
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        raise ValueError(
            f'patch_model: the model is spread over {sorted(map(str, devices))} by device_map="auto"; load it without'
            " device_map and let accelerate place it."
        )
    if config.vocab is not None and inspect.unwrap(model.forward).__module__.startswith("liger_kernel"):
        raise ValueError(
            f"patch_model: Liger has replaced the forward of {type(model).__name__}, so there are no logits to bound;"
            " leave its fused_linear_cross_entropy off, or patch with LongMoEConfig(vocab=None)."
        )
    check_launch()


def check_launch(training: PreTrainedModel | None = None) -> None:
    """
    Arguments:
        training: a model that is about to take its first step.

    Raises:
        `ValueError`: the launch, or the Accelerator that exists by now, uses DeepSpeed, Megatron-LM or FSDP1, or asks
            for tensor or sequence parallelism; or for context parallelism, which the model has not got.
        `ImportError`: context parallelism, without axolotl-ringmaster.
    """
    # Made by Accelerator() or the Trainer, perhaps not from the environment.
    state = AcceleratorState._shared_state
    kind = state.get("distributed_type")
    if (
        is_deepspeed_zero3_enabled()
        or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        or kind == DistributedType.DEEPSPEED
    ):
        raise ValueError(
            "hf_longmoe does not run under DeepSpeed; launch with DDP or FSDP2 (see accelerate_configs/)."
        )
    if kind == DistributedType.MEGATRON_LM or os.environ.get("ACCELERATE_USE_MEGATRON_LM", "false").lower() == "true":
        raise ValueError(
            "hf_longmoe does not run under Megatron-LM; launch with DDP or FSDP2 (see accelerate_configs/)."
        )
    plugin = state.get("fsdp_plugin")
    version = os.environ.get("FSDP_VERSION", "1") if plugin is None else str(plugin.fsdp_version)
    if version == "1" and (plugin is not None or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"):
        raise ValueError(_FSDP1)
    parallel = state.get("parallelism_config")
    for kind in ("tp", "cp", "sp"):
        size = int(os.environ.get(f"PARALLELISM_CONFIG_{kind.upper()}_SIZE", "1"))
        size = size if parallel is None else getattr(parallel, f"{kind}_size")
        if size > 1 and kind != "cp":
            raise ValueError(
                f"The launch asks for {kind}_size={size} (ParallelismConfig), which hf_longmoe does not take yet; set"
                f" {kind}_size to 1."
            )
        if size > 1:
            check_ringmaster()
            if training is not None and "longmoe_sequences" not in vars(training):
                raise ValueError(
                    f"The launch asks for cp_size={size} (ParallelismConfig), which LongMoEPlugin brings about: call"
                    " LongMoEPlugin(config).install(accelerator) before the model is prepared, or set cp_size to 1."
                )


def check_expert_dtype(name: str, experts: nn.Module, sharding: DistributedConfig) -> None:
    """
    Raises:
        `ValueError`: experts in float16 or float64 of which FSDP2 holds one copy: it divides their gradients by the
            number of data ranks twice (torch 2.13; float32 and bfloat16 are right).
    """
    dtype = next((p.dtype for p in experts.parameters()), None)
    if dtype in (torch.float16, torch.float64) and sharding.efsdp_size == 1 and sharding.dp_size > 1:
        raise ValueError(
            f"patch_model: {name} is {str(dtype).removeprefix('torch.')}, in which FSDP2 divides the gradients of"
            " experts that it holds one copy of (ep_size == fsdp_size * tp_size) twice; load the model in bfloat16 or"
            " float32."
        )


def check_tied(model: nn.Module) -> None:
    """
    Arguments:
        model: sharded at load, or a wrapper of one.

    Raises:
        `ValueError`: its head is tied to input embeddings whose rows the ranks cannot divide evenly. FSDP2 holds such
            a weight twice, of which only one copy sees the optimizer's steps (torch 2.13, Transformers 5.24).
    """
    target = causal_lm(model)
    head, weight = target.get_output_embeddings(), target.get_input_embeddings().weight
    if getattr(head, "weight", None) is not weight or not isinstance(weight, DTensor) or not weight.requires_grad:
        return
    sizes = zip(weight.placements, weight.device_mesh.shape, strict=True)
    parts = math.prod(size for placement, size in sizes if placement.is_shard(0))
    if len(weight) % parts:
        raise ValueError(
            f"{type(target).__name__} has embeddings of {len(weight)} rows, tied to its head, which {parts} ranks"
            " cannot divide evenly: FSDP2 would go on with the rows as they were loaded on some ranks. Save it once"
            f" with resize_token_embeddings({len(weight)}, pad_to_multiple_of={parts}), or use a number of ranks that"
            f" divides {len(weight)}."
        )


def check_shared_batch(model: PreTrainedModel, input_ids: torch.Tensor | None) -> None:
    """
    Every rank must come here.

    Raises:
        `ValueError`: ranks of one tensor-parallel group, which compute one batch together, were given different ones;
            on every rank.
    """
    meshes = getattr(model, "_mesh_manager", None)
    if input_ids is None or meshes is None or meshes.get_mesh("tp").size() == 1:
        return
    place = torch.arange(1, input_ids.numel() + 1, device=input_ids.device)
    mine = torch.stack([(input_ids.reshape(-1) * place).sum(), place.new_tensor(input_ids.numel())])
    batches = GroupWire(distributed.group.WORLD).gather(mine)
    group = distributed.get_process_group_ranks(meshes.get_mesh("tp").get_group())
    groups = GroupWire(distributed.group.WORLD).gather(torch.tensor(group, device=input_ids.device))
    for ranks in groups:
        if any(batches[rank] != batches[ranks[0]] for rank in ranks):
            raise ValueError(
                f"Ranks {ranks} are one tensor-parallel group (tp_size={len(ranks)}) but were given different batches;"
                " give all of them the same one: sample by data-parallel rank, not by rank."
            )


def why_left_alone(
    name: str, module: nn.Module, forward_known: bool = False, adapters_known: bool = False
) -> str | None:
    """
    Why an experts module, an MLP or a head is not patched; `None` if it can be.

    Arguments:
        forward_known: a forward that something else has put there is one that we replace and put back.
        adapters_known: what wraps it is run by the schedule too.
    """
    if not adapters_known and "base_layer" in name.split(".") or type(module).__module__.startswith("peft."):
        return "an adapter wraps it; put adapters on other modules, or merge them first"
    if parametrize.is_parametrized(module):
        return "its weights are parametrized"
    if "forward" in vars(module) and not forward_known:
        return "something else replaced its forward (expert parallelism does)"
    params = dict(module.named_parameters())
    if not params:
        return "it has no parameters to compute gradients for (quantised weights are buffers); load it in bf16"
    for param_name, param in params.items():
        if not param.is_floating_point() or param.element_size() < 2:
            return f"its weights are quantised ({param_name} is {param.dtype}); load it in bf16"
        if is_traceable_wrapper_subclass(param) and not isinstance(param, DTensor):
            return f"its weights are quantised ({param_name} is a {type(param).__name__}); load it in bf16"
    return why_not_by_token(module)
