"""What the graph holds between forward and backward, in the place of the tensors that checkpoint functions save."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hf_longmoe.schedules.boundaries.piece import Piece

__all__ = ["Boundary", "Forward", "Other", "Pack", "unpack"]


class Forward:
    """The boundaries of one forward, in order; those that are no longer wanted are dead."""

    def __init__(self, expected: int) -> None:
        self.expected, self.offloaded = expected, 0
        self.boundaries: list[weakref.ref[Boundary]] = []

    def newest(self) -> Boundary | None:
        return self.boundaries[-1]() if self.boundaries else None


class Boundary:
    """
    What the graph holds in the place of a layer's input. It dies when the graph lets go of it.

    Arguments:
        forward: that it belongs to.
        piece: the input; what the layer keeps for its replay comes after it in `pieces`.
        give_back: is asked for the input, with this, in backward.
    """

    def __init__(self, forward: Forward, piece: Piece, give_back: Callable[[Boundary], torch.Tensor]) -> None:
        self.forward, self.pieces, self._give_back = forward, [piece], give_back
        self.at = len(forward.boundaries)
        self.waits = True  # to be sent to the host: neither sent nor bound to stay
        self.sent = self.packed = False

    def unpack(self) -> torch.Tensor:
        return self._give_back(self)

    def __del__(self) -> None:
        # A graph was holding it and lets go, so nothing will be replayed; but reentrant checkpoints hold on to their
        # regions, and these to what they kept, for as long as the loss lives.
        if self.packed and not sys.is_finalizing():
            for piece in self.pieces:
                piece.close()


class Other:
    """Any other tensor that is saved: as it is, with autograd's own check, which the hooks replace."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached, or an operator's output and its node would hold each other; autograd ties it to its node again.
        self.tensor, self.version = tensor.detach(), tensor._version

    def unpack(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"A tensor saved for backward, {self.tensor.dtype} of shape {list(self.tensor.shape)}, has been"
                f" modified by an inplace operation: it is at version {self.tensor._version}, not {self.version}."
            )
        return self.tensor


class Pack:
    """Tells the boundary from other tensors. The graph keeps this object: nothing may be left in it."""

    def __init__(self, tensor: torch.Tensor, boundary: Boundary) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.boundary: Boundary | None = boundary

    def __call__(self, tensor: torch.Tensor) -> Any:
        if tensor is self.tensor:
            self.boundary.packed = True
            return self.boundary
        return Other(tensor)


def unpack(saved: Boundary | Other) -> torch.Tensor:
    return saved.unpack()
