"""What a benchmark hands to the harness: cases, and the tensors and steps that a case stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
    """

    given: Sequence[torch.Tensor]
    upstream: torch.Tensor
    baseline: Callable[[], torch.Tensor]
    ours: Callable[[], torch.Tensor]
    reference: Callable[[], list[torch.Tensor]]

    def leaves(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.given if tensor.requires_grad]


class Sizes(Protocol):
    """The plain numbers of a problem: a frozen dataclass."""

    tokens: int

    def build(self) -> Problem:
        """The problem, the same at every call."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """
    One row of the table.

    Arguments:
        name (`str`): sizes and budget included.
        sizes (`Sizes`): what is run.
        limits (`dict[str, float]`): `peak_saved` at least, `cpu_ratio` and `peak_bytes` at most.
        gate (`bool`, defaults to `False`): whether a missed limit fails the command.
        timed (`bool`, defaults to `True`): `False`: peaks and errors only; the ratios are `None`.
        grows_from (`Growth`, *optional*): adds a limit on `peak_bytes` from the peak of an earlier case.
    """

    name: str
    sizes: Sizes
    limits: Mapping[str, float] = field(default_factory=dict)
    gate: bool = False
    timed: bool = True
    grows_from: Growth | None = None


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
    """Forward and backward; the gradients are left on the leaves."""
    output = problem.baseline() if side == "baseline" else problem.ours()
    output.backward(problem.upstream)
    return output


def clear(problem: Problem) -> None:
    for leaf in problem.leaves():
        leaf.grad = None
