"""
A frozen head in one pass: its only gradient is that of the hidden states, which forward gathers. See `ring.py`.

With m a token's largest logit so far, S = Σ exp(z - m) and A = Σ exp(z - m)·t·W over its vocabulary so far, where t is
1 - tanh² of a soft cap, or 1, and s the label smoothing:

    dh = scale · ((1 + 2·z_loss·lse) · A / S - (1 - s) · t(label) · W[label] - s · mean(W))

As m grows, S and A are multiplied by exp(old m - new m): 4·T·V·H operations instead of 8 in two passes. A soft cap
together with smoothing would need the mean of t·W for each token, so that takes two passes.
"""

from __future__ import annotations

import torch

from hf_longmoe.schedules.vocab.fold import LARGEST, TARGET, empty_statistics, fade, merge, within
from hf_longmoe.schedules.vocab.ring_hops import Hops

__all__ = ["FrozenPass"]


class FrozenPass(Hops):
    """The sum of the losses, and its gradient of the rank's hidden states."""

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum, and dh `[T, H]` in the dtype of sums."""
        self.dh = self.hidden.new_zeros(self.hidden.shape, dtype=self.wide)
        self.mean = self._mean() if self.call.objective.label_smoothing else None
        if self.plan.travel == "tokens":
            total = self.dh.new_zeros(())
            for tile in range(self.plan.tiles):
                total += self._tokens(tile, self.plan.part(self.wire.rank, tile))
        else:
            total = self._entries()
        return total, self.dh

    def _mean(self) -> torch.Tensor:
        """Of all rows of the weight `[H]`, times the label smoothing."""
        each, own = [1] * self.wire.size, self.dh.new_zeros(self.dh.shape[1])
        for piece in self.pieces(self.plan.entries[self.wire.rank]):
            own += self.own_entries(piece)[0].sum(0, dtype=self.wide)
        sums = self.wire.exchange(own.expand(self.wire.size, -1), each, each).wait().sum(0)
        return sums.mul_(self.call.objective.label_smoothing / self.plan.vocab_size)

    # -- tokens travel ------------------------------------------------------------------------------------------------
    def _tokens(self, tile: int, part: slice) -> torch.Tensor:
        behind, first = None, self.plan.offset(self.wire.rank)
        for _, following, (hidden, labels) in self.travel(tile, self.own_tokens(part)):
            found = empty_statistics(hidden.shape[0], self.block.buffer)
            sums = hidden.new_zeros(hidden.shape, dtype=self.wide)
            hidden = self.block.products.hidden(hidden)
            for piece in self.pieces(self.plan.entries[self.wire.rank]):
                self._fold(hidden, self.own_entries(piece), labels - (first + piece.start), found, sums)
            if behind is not None:
                self._merge(found, sums, *(pending.wait() for pending in behind[:2]))
            rows = self._rows(self.shard, labels - first)
            if behind is not None:
                rows += behind[2].wait()  # zeros but for one rank's
            behind = [self.send_on(tensor, tile, following) for tensor in (found, sums, rows)]
            del hidden, labels, found, sums, rows
        found, sums, rows = (pending.wait() for pending in behind)
        self._finish(found, sums)
        sums.sub_(rows * self._label_weight(found))
        self.dh[self.where(part)] = sums
        return self.call.objective.losses(found).sum()

    @staticmethod
    def _merge(found: torch.Tensor, sums: torch.Tensor, others: torch.Tensor, more: torch.Tensor) -> None:
        """Adds another part of the vocabulary to `found` and `sums`."""
        largest = torch.maximum(found[:, LARGEST], others[:, LARGEST])
        sums.mul_(fade(found, largest)[:, None]).add_(more.mul_(fade(others, largest)[:, None]))
        found.copy_(merge(others, found))

    # -- weights travel -----------------------------------------------------------------------------------------------
    def _entries(self) -> torch.Tensor:
        count, rank = self.plan.tokens[self.wire.rank], self.wire.rank
        found = empty_statistics(count, self.block.buffer)
        for tile in range(self.plan.tiles):
            for owner, _, entries in self.travel(tile, self.own_entries(self.plan.part(rank, tile))):
                first = self.plan.offset(owner) + self.plan.part(owner, tile).start
                for piece in self.pieces(count):
                    hidden, labels = self.own_tokens(piece)
                    sums = self.dh[self.where(piece)]
                    self._fold(self.block.products.hidden(hidden), entries, labels - first, found[piece], sums)
                    self._put(piece, sums)
                del entries
        total = found.new_zeros(())
        for piece in self.pieces(count):
            sums = self.dh[self.where(piece)]
            self._finish(found[piece], sums)
            self._put(piece, sums)
            total += self.call.objective.losses(found[piece]).sum()
        for tile in range(self.plan.tiles):
            for owner, _, (weight,) in self.travel(tile, self.own_entries(self.plan.part(rank, tile))[:1]):
                first = self.plan.offset(owner) + self.plan.part(owner, tile).start
                for piece in self.pieces(count):
                    self._take_labels(piece, weight, first, found[piece])
                del weight
        return total

    def _put(self, piece: slice, sums: torch.Tensor) -> None:
        if self.call.index is not None:  # else they are a view
            self.dh[self.where(piece)] = sums

    def _take_labels(self, piece: slice, weight: torch.Tensor, first: int, found: torch.Tensor) -> None:
        """dh of those tokens whose label's row has come."""
        where = self.where(piece)
        rows = self._rows(weight, self.call.labels[where].long() - first) * self._label_weight(found)
        if self.call.index is None:
            self.dh[where].sub_(rows)
        else:
            self.dh.index_add_(0, where, rows, alpha=-1)

    # -- some tokens --------------------------------------------------------------------------------------------------
    def _fold(self, hidden: torch.Tensor, entries: list, labels: torch.Tensor, found: torch.Tensor, sums) -> None:
        """A block: into the statistics `[n, 3]` and the sums A `[n, H]`, times `products.unit`."""
        z, kept = self.block.logits(hidden, *entries)
        if not z.numel():
            return
        new, products = self.block.fold(z, labels, at_least=found[:, LARGEST]), self.block.products
        sums.mul_(fade(found, new[:, LARGEST])[:, None])
        self.call.objective.transform.backward_(z, kept)
        if products.unit != 1.0:
            z.mul_(products.unit)
        products.dh(products.gradient(z), entries[0], sums, first=False)
        found.copy_(merge(found, new))

    def _finish(self, found: torch.Tensor, sums: torch.Tensor) -> None:
        """The sums A -> dh but for the labels' rows."""
        scale = self.call.objective.transform.scale
        factor = self.call.objective.slopes(found, found.new_ones(()))[:, 1]
        sums.mul_((factor * (scale / self.block.products.unit))[:, None])
        if self.mean is not None:
            sums.sub_(self.mean * scale)

    def _label_weight(self, found: torch.Tensor) -> torch.Tensor:
        """What the label's row is multiplied by `[n, 1]`."""
        transform = self.call.objective.transform
        weight = torch.full_like(found[:, TARGET], transform.scale * (1.0 - self.call.objective.label_smoothing))
        if transform.softcap is not None:
            weight.mul_(1.0 - (found[:, TARGET] / transform.softcap).square())
        return weight[:, None]

    def _rows(self, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """`[n, H]` in the products' dtype: rows of `weight` at labels relative to its first, zeros for the others."""
        if not len(weight):
            return weight.new_zeros(len(labels), weight.shape[1], dtype=self.call.dtype)
        here, at = within(labels, len(weight))
        return weight[at.squeeze(1)].to(self.call.dtype).masked_fill_(~here[:, None], 0.0)
