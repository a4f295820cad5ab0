"""A shallow clone of a module, to run its class's own `forward` on other parameters, a wave or a tile at a time."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

__all__ = ["bare_clone"]


def bare_clone(module: nn.Module) -> nn.Module:
    """
    The same children and parameters, without a `forward` set on the instance (the schedule itself may sit there) and
    without hooks: those belong to the one call of `module` that the schedule stands for, not to each of its parts.
    """
    clone = object.__new__(type(module))  # not copy.copy: it would call FSDP2's __new__, which builds a module anew
    vars(clone).update(vars(module))
    vars(clone).pop("forward", None)
    clone._parameters, clone._modules = dict(module._parameters), dict(module._modules)
    for name, value in vars(module).items():
        if name.startswith(("_forward", "_backward")) and isinstance(value, OrderedDict):
            setattr(clone, name, OrderedDict())
    return clone
