"""A shallow clone of a module, to run its class's own `forward` on other parameters, a wave or a tile at a time."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

__all__ = ["bare_clone", "clone_as_it_is"]


def bare_clone(module: nn.Module) -> nn.Module:
    """
    The same children and parameters, without a `forward` set on the instance (the schedule itself may sit there) and
    without hooks: those belong to the one call of `module` that the schedule stands for, not to each of its parts.
    """
    clone = _shallow(module)
    vars(clone).pop("forward", None)
    for name, value in vars(module).items():
        if name.startswith(("_forward", "_backward")) and isinstance(value, OrderedDict):
            setattr(clone, name, OrderedDict())
    return clone


def clone_as_it_is(module: nn.Module) -> nn.Module:
    """
    A `bare_clone` whose children are clones too, so that what is set on them later (which adapter is active) does not
    reach it. Not those with a `forward` on the instance, which would still run on the child that it is bound to.
    """
    clones: dict[nn.Module, nn.Module] = {}

    def with_children(clone: nn.Module) -> nn.Module:
        for name, child in clone._modules.items():
            if child is not None and "forward" not in vars(child):
                if child not in clones:
                    clones[child] = with_children(_shallow(child))
                clone._modules[name] = clones[child]
        return clone

    return with_children(bare_clone(module))


def _shallow(module: nn.Module) -> nn.Module:
    clone = object.__new__(type(module))  # not copy.copy: it would call FSDP2's __new__, which builds a module anew
    vars(clone).update(vars(module))
    clone._parameters, clone._modules = dict(module._parameters), dict(module._modules)
    return clone
