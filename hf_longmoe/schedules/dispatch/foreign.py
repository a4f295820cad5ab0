"""Experts lent to other ranks for some waves: their weights on the way there, their gradients on the way home."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hf_longmoe.schedules.dispatch.exchange import ExchangePlan
from hf_longmoe.schedules.dispatch.gradients import WeightGradients
from hf_longmoe.schedules.numerics import accumulation_dtype
from hf_longmoe.schedules.wire import Pending, Wire

__all__ = ["Lending"]


class Lending:
    """
    What one rank lends and borrows in one pass over a plan's waves.

    An expert travels as one row, `[parameter 0 | parameter 1 | ...]`, each flattened; the gradients of those that
    train do so in `accumulation_dtype`. A parameter that is not stacked, all experts share, and every rank has.

    Arguments:
        wire: to the ranks.
        plan: of the pass.
        params: the rank's own experts; not kept. They travel in the first one's dtype, which is stacked.
        stacked: for each, whether its first dimension is the experts.
        wanted: for each, whether it trains; all of them if not given.
    """

    def __init__(
        self,
        wire: Wire,
        plan: ExchangePlan,
        params: Sequence[torch.Tensor],
        stacked: Sequence[bool],
        wanted: Sequence[bool] | None = None,
    ) -> None:
        self.wire, self.plan, self.stacked = wire, plan, stacked
        self.count = params[0].shape[0]
        self.shapes = [param.shape[1:] for param in params]
        self.sizes = [shape.numel() if own else 0 for shape, own in zip(self.shapes, stacked, strict=True)]
        wanted = [True] * len(params) if wanted is None else wanted
        self.wanted = [want and own for want, own in zip(wanted, stacked, strict=True)]
        self.trained = [size if want else 0 for size, want in zip(self.sizes, self.wanted, strict=True)]
        self._weights: dict[int, list[torch.Tensor | None]] = {}  # of a borrowed expert: views [1, ...]
        self._gradients: dict[int, list[torch.Tensor | None]] = {}
        self._going: dict[int, torch.Tensor] = {}  # by the wave after which they go home
        waves = range(plan.num_waves)
        self._finish = {e: j for j in waves for e in plan.finishes(wire.rank, j)}

    # -- weights -----------------------------------------------------------------------------------------------------
    def fetch(self, wave: int, params: Sequence[torch.Tensor]) -> tuple[list[int], Pending] | None:
        """Sends for the experts that are first needed in this wave, and sends what others need in it."""
        if not self.plan.moves_weights(wave):
            return None
        pairs, mine = self.plan.lends(self.wire.rank, wave), self.plan.fetches(self.wire.rank, wave)
        rows = params[0].new_empty(len(pairs), sum(self.sizes))
        for row, (_, expert) in zip(rows, pairs, strict=True):
            for view, param, own in zip(row.split(self.sizes), params, self.stacked, strict=True):
                if own:
                    view.copy_(param[expert % self.count].reshape(-1))
        return mine, self.wire.exchange(rows, self._homes(mine), self._takers(pairs))

    def arrive(self, fetched: tuple[list[int], Pending] | None) -> None:
        if fetched is not None:
            experts, pending = fetched
            for row, expert in zip(_each(pending.wait()), experts, strict=True):
                self._weights[expert] = self._views(row, self.sizes, self.stacked)

    def weights(self, expert: int, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A borrowed expert's parameters, stacked: `[1, ...]`; out of `params`, those that all experts share."""
        return [mine if own is None else own for own, mine in zip(self._weights[expert], params, strict=True)]

    def drop(self, wave: int) -> None:
        """Lets go of the weights that no later wave needs."""
        for expert in self.plan.finishes(self.wire.rank, wave):
            del self._weights[expert]

    # -- gradients ---------------------------------------------------------------------------------------------------
    def gradients(self, expert: int, mine: WeightGradients) -> WeightGradients:
        """Where a borrowed expert's weight gradients are summed, stacked: `[1, ...]`; the others' are `mine`."""
        if expert not in self._gradients:
            wave = self._finish[expert]
            group = self.plan.finishes(self.wire.rank, wave)
            like = self._weights[expert][0]
            rows = like.new_zeros(len(group), sum(self.trained), dtype=accumulation_dtype(like.dtype))
            self._going[wave] = rows
            self._gradients.update((e, self._trained(row)) for e, row in zip(group, _each(rows), strict=True))
        own = zip(self._gradients[expert], mine.grads, self.stacked, strict=True)
        return WeightGradients.into([lent if stacked else shared for lent, shared, stacked in own])

    def send_home(self, wave: int, like: torch.Tensor) -> tuple[list[int], Pending] | None:
        """
        Sends the gradients that this wave has finished, and sends for those that others have.

        Arguments:
            like: any tensor of the parameters' dtype and device.
        """
        if not self.plan.returns_weights(wave):
            return None
        pairs, mine = self.plan.returns(self.wire.rank, wave), self.plan.finishes(self.wire.rank, wave)
        for expert in mine:
            del self._gradients[expert]
        rows = self._going.pop(wave, None)
        if rows is None:
            rows = like.new_empty(0, sum(self.trained), dtype=accumulation_dtype(like.dtype))
        return [expert for _, expert in pairs], self.wire.exchange(rows, self._takers(pairs), self._homes(mine))

    def come_home(self, coming: tuple[list[int], Pending]) -> Iterator[tuple[int, list[torch.Tensor | None]]]:
        """(expert, a borrower's gradients of its parameters), in an order that depends on the plan only."""
        experts, pending = coming
        for row, expert in zip(_each(pending.wait()), experts, strict=True):
            yield expert, [None if view is None else view[0] for view in self._trained(row)]

    def _trained(self, row: torch.Tensor) -> list[torch.Tensor | None]:
        """Views of a row of gradients; `None` for a parameter that does not train."""
        return self._views(row, self.trained, self.wanted)

    def _views(self, row: torch.Tensor, sizes: Sequence[int], there: Sequence[bool]) -> list[torch.Tensor | None]:
        parts = zip(row.split(sizes, dim=1), self.shapes, there, strict=True)
        return [part.unflatten(1, shape) if have else None for part, shape, have in parts]

    def _homes(self, experts: Sequence[int]) -> list[int]:
        """How many of these experts each rank owns; they ascend, so they are grouped by owner."""
        return [sum(expert // self.count == rank for expert in experts) for rank in range(self.wire.size)]

    def _takers(self, pairs: Sequence[tuple[int, int]]) -> list[int]:
        return [sum(taker == rank for taker, _ in pairs) for rank in range(self.wire.size)]


def _each(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its rows, `[1, ...]` each (`split(1)` of no rows gives one part)."""
    return (rows[i : i + 1] for i in range(len(rows)))
