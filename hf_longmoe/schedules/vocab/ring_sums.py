"""
Ranks that have the same tokens, each a part of the vocabulary (tensor parallelism): nothing travels round the ring.

Of a tile of tokens each rank computes what its part of the vocabulary has to say; the ranks' largest logits, sums and
targets are reduced (three numbers a token), and in backward the hidden states' gradient. See `ring.py`.
"""

from __future__ import annotations

import torch

from hf_longmoe.schedules.vocab.fold import LARGEST, SUM, fade
from hf_longmoe.schedules.vocab.ring_pass import BackwardPass, ForwardPass
from hf_longmoe.schedules.wire import Pending

__all__ = ["SumsBackward", "SumsForward"]


class SumsForward(ForwardPass):
    """The same sum of the losses, and statistics, on every rank."""

    def _tokens(self, tile: int, part: slice) -> torch.Tensor:
        hidden, labels = self.own_tokens(part)
        found = self.statistics_here(hidden, labels - self.plan.offset(self.wire.rank))
        largest = self.wire.reduce(found[:, LARGEST].contiguous(), largest=True).wait()
        sums = found[:, SUM:].clone()
        sums[:, 0] *= fade(found, largest)
        found[:, SUM:] = self.wire.reduce(sums).wait()
        found[:, LARGEST] = largest
        return found


class SumsBackward(BackwardPass):
    """The gradients of the rank's part of the vocabulary, and the same dh on every rank."""

    _behind: tuple[slice, Pending] | None = None

    def _sweep(self) -> None:
        super()._sweep()
        self._arrived()

    def _tokens(self, tile: int, part: slice) -> None:
        hidden, labels = self.own_tokens(part)
        found = self.gradients_here(hidden, labels - self.plan.offset(self.wire.rank), self._slopes(part))
        self._arrived()
        if found is not None:
            self._behind = part, self.wire.reduce(found)

    def _arrived(self) -> None:
        """dh of the tile before, which has been under way while this one was computed."""
        if self._behind is not None:
            part, pending = self._behind
            self.dh[self.where(part)], self._behind = pending.wait(), None
