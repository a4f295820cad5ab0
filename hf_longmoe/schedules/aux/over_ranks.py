"""The router's sums of sequences that several ranks share: one reduction of 2·E + 1 numbers, for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_longmoe.schedules.aux.load_balancing import RouterSums
from hf_longmoe.schedules.wire import Wire

__all__ = ["sums_over_ranks"]


def sums_over_ranks(sums: Sequence[RouterSums], ranks: Wire) -> RouterSums:
    """
    The sums of all layers and all ranks, in one; the same on every rank.

    In backward every rank must come with the same gradient, since each holds the same loss. Then a rank's share is
    what all of them ask of its own sums, which is the number of ranks times what it asks itself: no communication.
    If gradients are averaged over the ranks, the result is that of one rank with all tokens.

    Arguments:
        sums (sequence of [`RouterSums`]): of this rank's tokens, one a layer, all of E experts.
        ranks (`Wire`): those that share sequences.
    """
    device = sums[0].probabilities.device
    probabilities = torch.stack([layer.probabilities.to(device) for layer in sums]).sum(0)
    counts = torch.stack([layer.counts.to(device) for layer in sums]).sum(0)
    rows = counts.new_zeros(1)
    for layer in sums:
        rows += layer.rows.to(device) if isinstance(layer.rows, torch.Tensor) else layer.rows
    probabilities, counts, rows = _SumOverRanks.apply(probabilities, counts, rows, ranks)
    return RouterSums(probabilities, counts, rows[0])


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, probabilities, counts, rows, ranks: Wire):
        ctx.size = ranks.size
        total = ranks.reduce(torch.cat([probabilities, counts, rows])).wait()
        probabilities, counts, rows = total.split([len(probabilities), len(counts), 1])
        probabilities, counts, rows = probabilities.clone(), counts.clone(), rows.clone()
        ctx.mark_non_differentiable(counts, rows)
        return probabilities, counts, rows

    @staticmethod
    def backward(ctx, gradient, *_):
        return gradient * ctx.size, None, None, None
