"""What a benchmark hands to the harness: cases, and the tensors and steps that a case stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

__all__ = ["SIDES", "Case", "Growth", "Problem", "Sizes", "clear", "step"]

SIDES = ("baseline", "ours")


@dataclass(frozen=True)
class Problem:
    """
    The same step, done in two ways and once more in float64.

    Arguments:
        given (`Sequence[torch.Tensor]`): the block's input and parameters, and what else both ways are given. Those
            that require a gradient get one.
        upstream (`torch.Tensor`): the gradient of the output.
        baseline, ours (`Callable`): the forward, `() -> output`.
        reference (`Callable`): the whole step in float64, `() -> [output, *gradients]`, in the order of `given`.
        backward (`bool`, defaults to `True`): `False`: the step is the forward alone, without autograd.
        details (`Callable`, *optional*): more keys of the entry, asked for after a step of ours.
    """

    given: Sequence[torch.Tensor]
    upstream: torch.Tensor
    baseline: Callable[[], torch.Tensor]
    ours: Callable[[], torch.Tensor]
    reference: Callable[[], list[torch.Tensor]]
    backward: bool = True
    details: Callable[[], dict[str, Any]] = dict

    def leaves(self) -> list[torch.Tensor]:
        """What gets a gradient."""
        return [tensor for tensor in self.given if tensor.requires_grad and self.backward]


class Sizes(Protocol):
    """The plain numbers of a problem: a frozen dataclass."""

    tokens: int

    def build(self) -> Problem:
        """The problem, the same at every call; that of this rank where a side is a group of processes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """
    One row of the table.

    Arguments:
        name (`str`): sizes and budget included.
        sizes (`Sizes`): what is run.
        limits (`dict[str, float | str]`): `peak_saved` at least, any other key of the entry at most. A string is the
            key that holds the limit.
        gate (`bool`, defaults to `False`): whether a missed limit fails the command.
        timed (`bool`, defaults to `True`): `False`: peaks and errors only; the ratios are `None`.
        grows_from (`Growth`, *optional*): adds a limit on `peak_bytes` from the peak of an earlier case.
        ranks (`int`, defaults to 1): processes of a side. Several are a gloo group of torch.distributed.
        steps (`int`, defaults to 1): timed together, where one step is too short to time.
    """

    name: str
    sizes: Sizes
    limits: Mapping[str, float | str] = field(default_factory=dict)
    gate: bool = False
    timed: bool = True
    grows_from: Growth | None = None
    ranks: int = 1
    steps: int = 1


@dataclass(frozen=True, kw_only=True)
class Growth:
    """
    How much higher than an earlier case's a peak may be: `slack` of it, and some bytes for each unit more.

    Arguments:
        case (`str`): the earlier case's name.
        unit (`str`): what there is more of, e.g. `"row"`.
        units (`int`): how many more.
        bytes_per_unit (`int`): at most.
        slack (`float`, defaults to 0.0): fraction of the earlier peak.
    """

    case: str
    unit: str
    units: int
    bytes_per_unit: int
    slack: float = 0.0


def step(problem: Problem, side: str) -> torch.Tensor:
    """Forward and, where the problem has it, backward; the gradients are left on the leaves."""
    with torch.set_grad_enabled(problem.backward):
        output = problem.baseline() if side == "baseline" else problem.ours()
    if problem.backward:
        output.backward(problem.upstream)
    return output


def clear(problem: Problem) -> None:
    for leaf in problem.leaves():
        leaf.grad = None
