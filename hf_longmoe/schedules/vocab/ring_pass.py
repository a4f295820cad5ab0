"""The two passes round the ring: forward gathers statistics, backward gradients. See `ring.py`."""

from __future__ import annotations

import torch

from hf_longmoe.schedules.vocab.fold import empty_statistics, merge
from hf_longmoe.schedules.vocab.ring_hops import Hops

__all__ = ["BackwardPass", "ForwardPass"]


class ForwardPass(Hops):
    """The statistics of the rank's valid tokens over the whole vocabulary."""

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the losses, and the statistics `[N, 3]`."""
        count = self.plan.tokens[self.wire.rank]
        found = empty_statistics(count, self.block.buffer)
        for tile in range(self.plan.tiles):
            part = self.plan.part(self.wire.rank, tile)
            if self.plan.travel == "weights":
                self._entries(tile, part, found)
            else:
                found[part] = self._tokens(tile, part)
        total = found.new_zeros(())
        for piece in self.pieces(count):
            total += self.call.objective.losses(found[piece]).sum()
        return total, found

    def _tokens(self, tile: int, part: slice) -> torch.Tensor:
        behind, first = None, self.plan.offset(self.wire.rank)
        for _, following, (hidden, labels) in self.travel(tile, self.own_tokens(part)):
            found = self.statistics_here(hidden, labels - first)
            if behind is not None:
                found = merge(behind.wait(), found)
            behind = self.send_on(found, tile, following)
            del hidden, labels
        return behind.wait()

    def statistics_here(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Of a tile of tokens, `labels` relative to the rank's first entry, over the rank's part of the vocabulary."""
        found = empty_statistics(hidden.shape[0], self.block.buffer)
        hidden = self.block.products.hidden(hidden)
        for piece in self.pieces(self.plan.entries[self.wire.rank]):
            z, _ = self.block.logits(hidden, *self.own_entries(piece))
            found = merge(found, self.block.fold(z, labels - piece.start))
        return found

    def _entries(self, tile: int, part: slice, found: torch.Tensor) -> None:
        for owner, _, entries in self.travel(tile, self.own_entries(part)):
            first = self.plan.offset(owner) + self.plan.part(owner, tile).start
            for piece in self.pieces(len(found)):
                hidden, labels = self.own_tokens(piece)
                z, _ = self.block.logits(self.block.products.hidden(hidden), *entries)
                found[piece] = merge(found[piece], self.block.fold(z, labels - first))
            del entries


class BackwardPass(Hops):
    """
    The gradients, in the dtype of sums; `None` for what needs none.

    Arguments:
        statistics: as `ForwardPass` gave them.
        coefficient: of the rank's losses in what is differentiated, a scalar tensor.
    """

    def __init__(self, call, hidden, shard, bias, statistics: torch.Tensor, coefficient: torch.Tensor) -> None:
        super().__init__(call, hidden, shard, bias, gradient=True)
        for_hidden, for_weight, for_bias = call.needs
        self.dh = hidden.new_zeros(hidden.shape, dtype=self.wide) if for_hidden else None
        self.dw = shard.new_zeros(shard.shape, dtype=self.wide) if for_weight else None
        self.db = bias.new_zeros(bias.shape, dtype=self.wide) if for_bias else None
        self.statistics, self.unit = statistics, self._unit(coefficient)
        self.coefficient = coefficient / self.unit

    def run(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """dh, dW and db."""
        self._sweep()
        unit = self.unit / self.block.products.unit
        for gradient, scale in ((self.dh, 1.0), (self.dw, self.call.weight_scale), (self.db, self.call.weight_scale)):
            if gradient is not None:
                gradient.mul_(unit * scale)
        return self.dh, self.dw, self.db

    def _sweep(self) -> None:
        for tile in range(self.plan.tiles):
            part = self.plan.part(self.wire.rank, tile)
            if self.plan.travel == "weights":
                self._entries(tile, part)
            else:
                self._tokens(tile, part)

    def _unit(self, coefficient: torch.Tensor) -> torch.Tensor | float:
        """A power of two that brings every rank's coefficient below 1, where the products have a narrow range."""
        if self.block.products.unit == 1.0:
            return 1.0
        each = [1] * self.wire.size
        largest = self.wire.exchange(coefficient.expand(self.wire.size), each, each).wait().abs().amax()
        return torch.ldexp(torch.ones_like(largest), largest.frexp().exponent)

    def _slopes(self, part: slice) -> torch.Tensor:
        return self.call.objective.slopes(self.statistics[part], self.coefficient)

    def _tokens(self, tile: int, part: slice) -> None:
        behind, first = None, self.plan.offset(self.wire.rank)
        for _, following, (hidden, labels, slopes) in self.travel(tile, [*self.own_tokens(part), self._slopes(part)]):
            found = self.gradients_here(hidden, labels - first, slopes)
            if found is not None:
                if behind is not None:
                    found += behind.wait()
                behind = self.send_on(found, tile, following)
            del hidden, labels, slopes, found
        if behind is not None:
            self.dh[self.where(part)] = behind.wait()

    def gradients_here(self, hidden: torch.Tensor, labels: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor | None:
        """
        Of a tile of tokens against the rank's part of the vocabulary: adds to dW and db, and gives what the part adds
        to the tokens' dh, `None` if they need none. `labels`: relative to the rank's first entry.
        """
        products = self.block.products
        hidden = products.hidden(hidden)
        found = None if self.dh is None else hidden.new_zeros(hidden.shape, dtype=self.wide)
        for piece in self.pieces(self.plan.entries[self.wire.rank]):
            entries = self.own_entries(piece)
            gradient = self._gradient(hidden, entries, slopes, labels - piece.start)
            if self.db is not None:
                self.db[piece] += gradient.sum(0)
            gradient = products.gradient(gradient)
            if found is not None:
                products.dh(gradient, entries[0], found, first=False)
            if self.dw is not None:
                products.dw(gradient, hidden, self.dw[piece], first=False)
        return found

    def _entries(self, tile: int, part: slice) -> None:
        behind: list = []
        for owner, following, entries in self.travel(tile, self.own_entries(part)):
            first = self.plan.offset(owner) + self.plan.part(owner, tile).start
            needed = zip(entries, self.call.needs[1:], strict=False)
            found = [torch.zeros_like(tensor, dtype=self.wide) if need else None for tensor, need in needed]
            for piece in self.pieces(self.plan.tokens[self.wire.rank]):
                self._entries_piece(piece, entries, first, *found)
            found = [tensor for tensor in found if tensor is not None]
            for tensor, pending in zip(found, behind, strict=False):
                tensor += pending.wait()
            behind = [self.send_on(tensor, tile, following) for tensor in found]
            del entries, found
        home = [gradient for gradient in (self.dw, self.db) if gradient is not None]
        for gradient, pending in zip(home, behind, strict=True):
            gradient[part] = pending.wait()

    def _entries_piece(self, piece: slice, entries: list, first: int, dw=None, db=None) -> None:
        """Own tokens against entries that travel: adds to dh here, and to dw and db, which travel along."""
        products = self.block.products
        hidden, labels = self.own_tokens(piece)
        hidden = products.hidden(hidden)
        gradient = self._gradient(hidden, entries, self._slopes(piece), labels - first)
        if db is not None:
            db += gradient.sum(0)
        gradient = products.gradient(gradient)
        if dw is not None:
            products.dw(gradient, hidden, dw, first=False)
        if self.dh is not None and self.call.index is None:
            products.dh(gradient, entries[0], self.dh[piece], first=False)
        elif self.dh is not None:
            found = self.dh.new_empty(hidden.shape)
            products.dh(gradient, entries[0], found)
            self.dh.index_add_(0, self.where(piece), found)

    def _gradient(self, hidden: torch.Tensor, entries: list, slopes: torch.Tensor, labels: torch.Tensor):
        return self.block.gradient(*self.block.logits(hidden, *entries), slopes, labels)
