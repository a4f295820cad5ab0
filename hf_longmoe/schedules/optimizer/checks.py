"""What the streaming AdamW refuses, and how it says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_longmoe.config import OptimizerConfig
from hf_longmoe.schedules.optimizer.arena import HALF, flat, local
from hf_longmoe.schedules.optimizer.plan import BOTH_WAYS, capacity

__all__ = [
    "check_adamw",
    "check_caps",
    "check_gradient",
    "check_groups",
    "check_hyperparameters",
    "check_parameter",
    "check_state",
]

_OTHER_ARITHMETIC = ("amsgrad", "maximize")
_OTHER_WAYS = ("foreach", "capturable", "differentiable")


def check_hyperparameters(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> None:
    """
    Raises:
        `ValueError`: one is out of range; the message names it.
    """
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"lr is a tensor of shape {tuple(lr.shape)}; give a number or a tensor of one element.")
    for name, value, most in (
        ("lr", lr, None),
        ("eps", eps, None),
        ("weight_decay", weight_decay, None),
        ("betas[0]", betas[0], 1.0),
        ("betas[1]", betas[1], 1.0),
    ):
        if not 0.0 <= float(value) or (most is not None and not float(value) < most):
            limit = "at least 0" if most is None else "at least 0 and below 1"
            raise ValueError(f"{name}={value} must be {limit}.")


def check_caps(caps: OptimizerConfig) -> None:
    """
    Raises:
        `ValueError`: the bucket is too small to be one, or the caps contradict each other.
    """
    capacity(caps.bucket, BOTH_WAYS)
    if caps.early_gradients and caps.update_on not in ("auto", "cpu"):
        raise ValueError(
            f"early_gradients=True with update_on={caps.update_on!r}: gradients that have gone to the host are "
            'used there; take update_on="cpu" or "auto".'
        )


def check_groups(groups: Any, whose: str, ways: bool = True) -> None:
    """
    Arguments:
        groups: parameter groups of a plain AdamW.
        whose: what they are of, for the message.
        ways: whether to refuse flags that change how, not what, is computed, too.

    Raises:
        `ValueError`: a group has a flag that the streaming update does not have.
    """
    for number, group in enumerate(groups):
        for flag in (*_OTHER_ARITHMETIC, *(_OTHER_WAYS if ways else ())):
            if group.get(flag):
                raise ValueError(
                    f"{whose}: group {number} has {flag}=True, which OffloadStreamAdamW does not have; make the AdamW "
                    f"without {flag}, or keep it and switch the streaming optimizer off."
                )
        if group.get("decoupled_weight_decay") is False:
            raise ValueError(f"{whose}: group {number} is of Adam, whose weight decay is another than AdamW's.")


def check_adamw(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        `TypeError`: not a `torch.optim.AdamW`, or a subclass of it.
        `ValueError`: one of its groups has a flag that is not there.
    """
    if type(optimizer) is not torch.optim.AdamW:
        kind = type(optimizer)
        what = "a subclass of AdamW, which may update otherwise" if isinstance(optimizer, torch.optim.AdamW) else ""
        raise TypeError(
            f"optimizer is {kind.__module__}.{kind.__qualname__}{what and f' ({what})'}; OffloadStreamAdamW takes "
            "over a plain torch.optim.AdamW only. Make that one, or switch the streaming optimizer off."
        )
    check_groups(optimizer.param_groups, "torch.optim.AdamW")


def check_parameter(param: torch.Tensor, name: str) -> None:
    """
    Raises:
        `ValueError`: of a dtype or layout, or on a device, that there is no update for.
    """
    if param.dtype not in (torch.float32, *HALF):
        raise ValueError(f"{name} is {param.dtype}; OffloadStreamAdamW updates float32, bfloat16 and float16.")
    if param.layout != torch.strided:
        raise ValueError(f"{name} is {param.layout}; OffloadStreamAdamW updates dense parameters.")
    if param.device.type == "meta":
        raise ValueError(f"{name} is on the meta device; materialize the model before step().")
    if flat(local(param)) is None:
        raise ValueError(f"{name} does not fill its memory (strides {param.stride()}); make it contiguous.")


def check_gradient(grad: torch.Tensor, name: str) -> None:
    """
    Raises:
        `ValueError`: sparse or complex.
    """
    if grad.layout != torch.strided:
        raise ValueError(
            f"The gradient of {name} is {grad.layout}; OffloadStreamAdamW wants dense ones "
            "(of an embedding: sparse=False)."
        )
    if not grad.is_floating_point():
        raise ValueError(f"The gradient of {name} is {grad.dtype}; OffloadStreamAdamW wants real numbers.")


def check_state(values: Mapping[str, Any], param: torch.Tensor, name: str) -> None:
    """
    Raises:
        `ValueError`: a loaded state is not one of AdamW, or of a parameter of another shape.
    """
    missing = [key for key in ("step", "exp_avg", "exp_avg_sq") if key not in values]
    unknown = [key for key in values if key not in ("step", "exp_avg", "exp_avg_sq", "master")]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}"
        raise ValueError(
            f"The loaded state of {name} {what}; it must have step, exp_avg, exp_avg_sq and may have master."
        )
    shape = tuple(local(param).shape)
    for key in ("exp_avg", "exp_avg_sq", "master"):
        if key in values and tuple(local(values[key]).shape) != shape:
            raise ValueError(
                f"The loaded {key} of {name} has shape {tuple(local(values[key]).shape)} on this rank, the parameter "
                f"{shape}. States of sharded models are loaded through torch.distributed.checkpoint."
            )
