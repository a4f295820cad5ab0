"""What every pass round the ring is made of: what a rank has, and how it goes from rank to rank. See `ring.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_longmoe.schedules.numerics import accumulation_dtype
from hf_longmoe.schedules.vocab.fold import Block, Objective
from hf_longmoe.schedules.vocab.ring_plan import RingPlan
from hf_longmoe.schedules.wire import Pending, Wire

__all__ = ["Hops", "RingCall"]


@dataclass(frozen=True, kw_only=True)
class RingCall:
    """
    Everything about a call but its tensors.

    Arguments:
        index: positions of the valid tokens `[N]`, int32; `None` if all are valid.
        labels: of all tokens `[T]`, integers.
        items: what the sum of the losses is divided by: a number, or a tensor of one element.
        dtype: what enters the products.
        needs: whether hidden states, weight and bias need a gradient.
        one_pass: whether forward gathers the gradient as well.
        weight_scale: factor of the gradients of weight and bias.
    """

    wire: Wire
    plan: RingPlan
    objective: Objective
    index: torch.Tensor | None
    labels: torch.Tensor
    items: float | torch.Tensor
    dtype: torch.dtype
    needs: tuple[bool, bool, bool]
    one_pass: bool
    weight_scale: float


class Hops:
    """
    One pass of one call.

    Arguments:
        hidden: `[T, H]`; `shard`: `[v, H]`; `bias`: `[v]` or `None`.
        gradient: whether gradients of the logits will be asked for.
    """

    def __init__(
        self, call: RingCall, hidden: torch.Tensor, shard: torch.Tensor, bias: torch.Tensor | None, gradient: bool
    ) -> None:
        self.call, self.wire, self.plan = call, call.wire, call.plan
        self.hidden, self.shard, self.bias = hidden, shard, bias
        self.wide = accumulation_dtype(call.dtype)
        rows, columns = (min(self.plan.tile, max(counts)) for counts in (self.plan.tokens, self.plan.entries))
        self.block = Block(rows, columns, hidden, hidden.shape[1], call.dtype, call.objective, gradient)

    # -- what a rank has ----------------------------------------------------------------------------------------------
    def where(self, part: slice) -> slice | torch.Tensor:
        """Positions of some of the valid tokens among all tokens."""
        return part if self.call.index is None else self.call.index[part].long()

    def own_tokens(self, part: slice) -> list[torch.Tensor]:
        """Hidden states, in the products' dtype, and labels of some of the valid tokens."""
        where = self.where(part)
        return [self.hidden[where].to(self.call.dtype), self.call.labels[where].long()]

    def own_entries(self, part: slice) -> list[torch.Tensor]:
        """Weight, and bias if there is one, of some of the rank's vocabulary, in the products' dtype."""
        return [tensor[part].to(self.call.dtype) for tensor in (self.shard, self.bias) if tensor is not None]

    def pieces(self, count: int) -> Iterator[slice]:
        """What stays, a block's side at a time."""
        for start in range(0, count, self.plan.tile):
            yield slice(start, min(start + self.plan.tile, count))

    # -- from rank to rank --------------------------------------------------------------------------------------------
    def send_on(self, tensor: torch.Tensor, tile: int, owner: int) -> Pending:
        """To the next rank; what comes from the one before has the rows of `owner`'s tile."""
        size, rank = self.wire.size, self.wire.rank
        part = self.plan.part(owner, tile)
        received, sent = [0] * size, [0] * size
        received[(rank - 1) % size], sent[(rank + 1) % size] = part.stop - part.start, tensor.shape[0]
        return self.wire.exchange(tensor, received, sent)

    def travel(self, tile: int, tensors: list[torch.Tensor]) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        """
        (owner, the owner one hop on, its tile) hop after hop, the next one already on its way.

        Two tiles are alive if the caller drops the one it was given before it asks for the next.
        """
        size = self.wire.size
        for hop in range(size):
            owner, following = (self.wire.rank - hop) % size, (self.wire.rank - hop - 1) % size
            ahead = [self.send_on(t, tile, following) for t in tensors] if hop < size - 1 else []
            yield owner, following, tensors
            tensors.clear()
            tensors.extend(pending.wait() for pending in ahead)
