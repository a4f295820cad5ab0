"""States in and out: `load_state_dict` in place, and the state as a plain AdamW reads it."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain
from typing import Any

import torch

from hf_longmoe.schedules.optimizer.checks import check_groups, check_state

__all__ = ["SHARE", "matched", "plain", "update_groups"]

SHARE = "accelerator_share"  # the key of a group that keeps what "auto" or "both" has found
_OURS = {SHARE, "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
_PLAIN = dict(
    amsgrad=False,
    maximize=False,
    foreach=None,
    capturable=False,
    differentiable=False,
    fused=None,
    decoupled_weight_decay=True,
)


def matched(
    loaded: dict[str, Any], groups: list[dict[str, Any]], names: dict[torch.Tensor, str]
) -> dict[Any, dict[str, Any]]:
    """
    The loaded states by parameter, after all checks.

    Raises:
        `ValueError`: the groups are others, or a state does not fit; nothing has been changed then.
    """
    saved = loaded["param_groups"]
    ours, theirs = ([len(group["params"]) for group in some] for some in (groups, saved))
    if ours != theirs:
        raise ValueError(f"The loaded state has groups of {theirs} parameters; this optimizer has groups of {ours}.")
    check_groups(saved, "The loaded state", ways=False)
    params = dict(
        zip(
            chain.from_iterable(group["params"] for group in saved),
            chain.from_iterable(group["params"] for group in groups),
            strict=True,
        )
    )
    found = {}
    for key, values in loaded["state"].items():
        param = params.get(key, key)
        if isinstance(param, torch.Tensor) and values:
            check_state(values, param, names[param])
        found[param] = dict(values) if isinstance(values, dict) else values
    return {param: values for param, values in found.items() if values}


def update_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """In place: schedulers and a plain AdamW may hold the same dicts. How a plain AdamW would compute is left out."""
    for group, new in zip(groups, saved, strict=True):
        kept = {key: value for key, value in new.items() if key != "params" and (key not in _OURS or key == SHARE)}
        group.update(deepcopy(kept))


def plain(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict without masters and without our key, and with the keys that `torch.optim.AdamW` wants."""
    state = {
        key: {name: value for name, value in values.items() if name != "master"}
        if isinstance(values, dict)
        else values
        for key, values in state_dict["state"].items()
    }
    groups = [
        {**_PLAIN, **{key: value for key, value in group.items() if key != SHARE}}
        for group in state_dict["param_groups"]
    ]
    return {"state": state, "param_groups": groups}
