"""One pass round the ring, forward or backward, and the autograd node that makes both. See `ring.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_longmoe.schedules.numerics import accumulation_dtype
from hf_longmoe.schedules.vocab.fold import Block, Objective, empty_statistics, merge
from hf_longmoe.schedules.vocab.loss import refuse_double_backward
from hf_longmoe.schedules.vocab.ring_plan import RingPlan
from hf_longmoe.schedules.wire import Pending, Wire

__all__ = ["RingCall", "RingLoss"]


@dataclass(frozen=True, kw_only=True)
class RingCall:
    """
    Everything about a call but its tensors.

    Arguments:
        index: positions of the valid tokens `[N]`; `None` if all are valid.
        labels: of the valid tokens `[N]`, int64.
        items: what the sum of the losses is divided by: a number, or a tensor of one element.
        dtype: what enters the products.
        weight_scale: factor of the gradients of weight and bias.
    """

    wire: Wire
    plan: RingPlan
    objective: Objective
    index: torch.Tensor | None
    labels: torch.Tensor
    items: float | torch.Tensor
    dtype: torch.dtype
    weight_scale: float


class RingLoss(torch.autograd.Function):
    """The rank's own loss, `apply(hidden [T, H], shard [v, H], bias [v] or None, call)`: a scalar."""

    @staticmethod
    def forward(ctx, hidden, shard, bias, call: RingCall):
        with torch.autocast(hidden.device.type, enabled=False), call.wire.together():
            statistics = _Ring(call, hidden, shard, bias, gradient=False).statistics()
            ctx.call = call
            ctx.save_for_backward(hidden, shard, bias, statistics)
            return call.objective.losses(statistics).sum() / call.items

    @staticmethod
    def backward(ctx, upstream):
        refuse_double_backward("ring_cross_entropy")
        hidden, shard, bias, statistics = ctx.saved_tensors
        call, needs = ctx.call, ctx.needs_input_grad
        with torch.autocast(hidden.device.type, enabled=False), call.wire.together():
            coefficient = (upstream / call.items).to(statistics.dtype).expand(statistics.shape[0])
            slopes = call.objective.slopes(statistics, coefficient)
            ring = _Ring(call, hidden, shard, bias, gradient=True)
            dh, dw, db = ring.gradients(slopes, needs[0], needs[1] or (bias is not None and needs[2]))
        if dh is not None:
            dh = dh.to(hidden.dtype)
        return dh, dw if needs[1] else None, db if bias is not None and needs[2] else None, None


class _Ring:
    """One pass of one call."""

    def __init__(self, call: RingCall, hidden: Any, shard: Any, bias: Any, gradient: bool) -> None:
        self.call, self.wire, self.plan = call, call.wire, call.plan
        self.hidden, self.shard, self.bias = hidden, shard, bias
        self.wide = accumulation_dtype(call.dtype)
        size = self.plan.tile
        self.block = Block(size, size, hidden, hidden.shape[1], call.dtype, call.objective, gradient)
        # A half-precision gradient is multiplied by this before the products: its entries are divided by the items.
        largest = max(self.plan.tokens)
        self.unit = 1.0 if self.block.products.unit == 1.0 else 2.0 ** (largest.bit_length() - 1)

    # -- what a rank has ----------------------------------------------------------------------------------------------
    def _own_hidden(self, part: slice) -> torch.Tensor:
        where = part if self.call.index is None else self.call.index[part]
        return self.hidden[where].to(self.call.dtype)

    def _own_entries(self, part: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = None if self.bias is None else self.bias[part].to(self.call.dtype)
        return self.shard[part].to(self.call.dtype), bias

    def _pieces(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self.plan.tile):
            yield slice(start, min(start + self.plan.tile, count))

    def _send_on(self, tensor: torch.Tensor, tile: int, owner: int) -> Pending:
        """To the next rank; what comes from the one before has the rows of `owner`'s tile."""
        size, rank = self.wire.size, self.wire.rank
        part = self.plan.part(owner, tile)
        received, sent = [0] * size, [0] * size
        received[(rank - 1) % size], sent[(rank + 1) % size] = part.stop - part.start, tensor.shape[0]
        return self.wire.exchange(tensor, received, sent)

    def _travel(self, tile: int, tensors: list[torch.Tensor]) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        """(owner, the owner one hop on, its tile) hop after hop, the next one already on its way."""
        size = self.wire.size
        for hop in range(size):
            owner, following = (self.wire.rank - hop) % size, (self.wire.rank - hop - 1) % size
            ahead = [self._send_on(t, tile, following) for t in tensors] if hop < size - 1 else []
            yield owner, following, tensors
            tensors.clear()  # the caller's are gone too by now
            tensors.extend(pending.wait() for pending in ahead)

    # -- forward ------------------------------------------------------------------------------------------------------
    def statistics(self) -> torch.Tensor:
        """Of the rank's valid tokens, over the whole vocabulary: `[N, 4]`."""
        own = self.plan.tokens[self.wire.rank]
        found = empty_statistics(own, self.hidden.new_empty((), dtype=self.wide))
        for tile in range(self.plan.tiles):
            if self.plan.travel == "tokens":
                part = self.plan.part(self.wire.rank, tile)
                found[part] = self._statistics_of_tokens(tile, part)
            else:
                part = self.plan.part(self.wire.rank, tile)
                self._statistics_of_entries(tile, part, found)
        return found

    def _statistics_of_tokens(self, tile: int, part: slice) -> torch.Tensor:
        behind, first = None, self.plan.offset(self.wire.rank)
        for _, following, (hidden, labels) in self._travel(tile, [self._own_hidden(part), self.call.labels[part]]):
            found = empty_statistics(hidden.shape[0], self.block.buffer)
            rows = self.block.products.hidden(hidden)
            for piece in self._pieces(self.plan.entries[self.wire.rank]):
                z, _ = self.block.logits(rows, *self._own_entries(piece))
                found = merge(found, self.block.fold(z, labels - (first + piece.start)))
            del rows
            if behind is not None:
                found = merge(behind.wait(), found)
            behind = self._send_on(found, tile, following)
        return behind.wait()

    def _statistics_of_entries(self, tile: int, part: slice, found: torch.Tensor) -> None:
        for owner, _, (weight, *bias) in self._travel(tile, self._entries(part)):
            first = self.plan.offset(owner) + self.plan.part(owner, tile).start
            for piece in self._pieces(len(found)):
                rows = self.block.products.hidden(self._own_hidden(piece))
                z, _ = self.block.logits(rows, weight, bias[0] if bias else None)
                found[piece] = merge(found[piece], self.block.fold(z, self.call.labels[piece] - first))

    def _entries(self, part: slice) -> list[torch.Tensor]:
        return [tensor for tensor in self._own_entries(part) if tensor is not None]

    # -- backward -----------------------------------------------------------------------------------------------------
    def gradients(self, slopes: torch.Tensor, for_hidden: bool, for_weight: bool) -> tuple:
        """dh in the dtype of sums, dW and db in the parameters'; `None` for what is not needed."""
        dh = self.hidden.new_zeros(self.hidden.shape, dtype=self.wide) if for_hidden else None
        dw = self.shard.new_zeros(self.shard.shape, dtype=self.wide) if for_weight else None
        db = self.bias.new_zeros(self.bias.shape, dtype=self.wide) if for_weight and self.bias is not None else None
        slopes[:, 1:] *= self.unit
        for tile in range(self.plan.tiles):
            part = self.plan.part(self.wire.rank, tile)
            if self.plan.travel == "tokens":
                self._gradients_of_tokens(tile, part, slopes, dh, dw, db)
            else:
                self._gradients_of_entries(tile, part, slopes, dh, dw, db)
        unit = 1.0 / (self.unit * self.block.products.unit)
        if dh is not None:
            dh.mul_(unit)
        if dw is not None:
            dw = dw.mul_(unit * self.call.weight_scale).to(self.shard.dtype)
        if db is not None:
            db = db.mul_(unit * self.call.weight_scale).to(self.bias.dtype)
        return dh, dw, db

    def _gradients_of_tokens(self, tile: int, part: slice, slopes: Any, dh: Any, dw: Any, db: Any) -> None:
        behind, first, products = None, self.plan.offset(self.wire.rank), self.block.products
        own = [self._own_hidden(part), self.call.labels[part], slopes[part]]
        for _, following, (hidden, labels, slope) in self._travel(tile, own):
            rows = products.hidden(hidden)
            found = None if dh is None else rows.new_zeros(rows.shape, dtype=self.wide)
            for piece in self._pieces(self.plan.entries[self.wire.rank]):
                weight, bias = self._own_entries(piece)
                gradient = self._gradient(rows, weight, bias, slope, labels - (first + piece.start), db, piece)
                if found is not None:
                    products.dh(gradient, weight, found, first=False)
                if dw is not None:
                    products.dw(gradient, rows, dw[piece], first=False)
            del rows
            if found is not None:
                if behind is not None:
                    found += behind.wait()
                behind = self._send_on(found, tile, following)
                del found
        if behind is not None:
            self._add_rows(dh, part, behind.wait())

    def _gradients_of_entries(self, tile: int, part: slice, slopes: Any, dh: Any, dw: Any, db: Any) -> None:
        behind, products, tokens = None, self.block.products, self.plan.tokens[self.wire.rank]
        for owner, following, (weight, *bias) in self._travel(tile, self._entries(part)):
            first = self.plan.offset(owner) + self.plan.part(owner, tile).start
            width = weight.shape[1] + len(bias)
            found = None if dw is None else weight.new_zeros(weight.shape[0], width, dtype=self.wide)
            for piece in self._pieces(tokens):
                rows, labels = products.hidden(self._own_hidden(piece)), self.call.labels[piece] - first
                into = found[:, -1] if found is not None and bias else None
                gradient = self._gradient(rows, weight, bias[0] if bias else None, slopes[piece], labels, into)
                if dh is not None:
                    self._add_dh(dh, piece, gradient, weight)
                if found is not None:
                    products.dw(gradient, rows, found[:, : weight.shape[1]], first=False)
            if found is not None:
                if behind is not None:
                    found += behind.wait()
                behind = self._send_on(found, tile, following)
                del found
        if behind is not None:
            found = behind.wait()
            dw[part] = found[:, : dw.shape[1]]
            if db is not None:
                db[part] = found[:, -1]

    def _gradient(self, rows, weight, bias, slope, labels, db, piece: slice = slice(None)) -> torch.Tensor:
        z, kept = self.block.logits(rows, weight, bias)
        gradient = self.block.gradient(z, kept, slope, labels)
        if db is not None:
            db[piece] += gradient.sum(0)
        return self.block.products.gradient(gradient)

    def _add_dh(self, dh: torch.Tensor, piece: slice, gradient: torch.Tensor, weight: torch.Tensor) -> None:
        if self.call.index is None:
            self.block.products.dh(gradient, weight, dh[piece], first=False)
        else:
            found = dh.new_empty(gradient.shape[0], dh.shape[1])
            self.block.products.dh(gradient, weight, found)
            dh.index_add_(0, self.call.index[piece], found)

    def _add_rows(self, dh: torch.Tensor, part: slice, rows: torch.Tensor) -> None:
        if self.call.index is None:
            dh[part] = rows
        else:
            dh.index_copy_(0, self.call.index[part], rows)
