"""A block of logits, some tokens by some of the vocabulary: folded into statistics, or turned into a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_longmoe.schedules.numerics import accumulation_dtype
from hf_longmoe.schedules.vocab.logits import LogitTransform
from hf_longmoe.schedules.vocab.products import SameDtype, choose_products

__all__ = ["Block", "Objective", "empty_statistics", "fade", "merge", "within"]

# Columns of a token's statistics, `[n, 3]`: its largest logit so far, the sum of exp(z - largest), and the mean of the
# logits under the wanted distribution: the label's logit, which label smoothing mixes with that of all.
LARGEST, SUM, TARGET = range(3)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """
    What is computed from a token's logits; see `linear_cross_entropy`.

    Arguments:
        vocab_size: V, of all ranks.
    """

    vocab_size: int
    transform: LogitTransform
    label_smoothing: float
    z_loss: float

    def losses(self, statistics: torch.Tensor) -> torch.Tensor:
        """`[n, 3]` of the whole vocabulary -> the tokens' losses `[n]`."""
        largest, scale, target = statistics.unbind(1)
        # Relative to the largest logit: for large logits lse - z[label] would cancel.
        lse = scale.log()
        loss = lse - (target - largest)
        if self.z_loss:
            loss = loss + self.z_loss * (lse + largest).square()
        return loss

    def slopes(self, statistics: torch.Tensor, coefficient: torch.Tensor) -> torch.Tensor:
        """`[n, 3]`, and the tokens' weight in the loss, a scalar -> `[n, 3]`: largest logit, factor of exp, weight."""
        largest, scale, _ = statistics.unbind(1)
        factor = coefficient / scale
        if self.z_loss:
            factor = factor * (1.0 + 2.0 * self.z_loss * (scale.log() + largest))
        return torch.stack([largest, factor, coefficient.expand_as(factor)], 1)


def empty_statistics(tokens: int, like: torch.Tensor) -> torch.Tensor:
    """Of no logits at all; in the dtype of sums."""
    statistics = like.new_zeros(tokens, 3, dtype=accumulation_dtype(like.dtype))
    statistics[:, LARGEST] = -torch.inf
    return statistics


def merge(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Statistics of two parts of the vocabulary -> of both."""
    largest = torch.maximum(a[:, LARGEST], b[:, LARGEST])
    merged = a + b
    merged[:, SUM] = a[:, SUM] * fade(a, largest) + b[:, SUM] * fade(b, largest)
    merged[:, LARGEST] = largest
    return merged


def fade(statistics: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """What exp(z - old largest) is multiplied by to be exp(z - new largest); 1 where there is no logit yet."""
    return torch.where(largest.isinf(), 1.0, (statistics[:, LARGEST] - largest).exp())


class Block:
    """
    The one workspace of every block, `[rows, columns]`; a second one keeps the logits if a soft cap needs them.

    Arguments:
        rows, columns: tokens and vocabulary entries of a block at most.
        like: a tensor of the device.
        hidden_size: H.
        dtype: what enters the products.
        objective: of the whole call.
        gradient: whether gradients will be asked for.
    """

    def __init__(
        self, rows: int, columns: int, like: torch.Tensor, hidden_size: int, dtype: torch.dtype, objective: Objective,
        gradient: bool,
    ) -> None:  # fmt: skip
        self.objective, self.dtype, self.wide = objective, dtype, accumulation_dtype(dtype)
        shape = like.new_empty((), dtype=dtype).expand(columns, hidden_size)
        self.products: SameDtype = choose_products(rows, shape, objective.transform.scale)
        self.buffer = like.new_empty(rows * columns, dtype=self.wide)
        keep = gradient and objective.transform.softcap is not None
        self.kept = like.new_empty(rows * columns, dtype=self.wide) if keep else None

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple:
        """`hidden` `[n, H]` (as `products.hidden` gave it), `weight` `[v, H]`, `bias` `[v]` -> z `[n, v]`, kept."""
        shape = (hidden.shape[0], weight.shape[0])
        z = self.buffer[: shape[0] * shape[1]].view(shape)
        kept = None if self.kept is None else self.kept[: z.numel()].view(shape)
        self.products.logits(hidden, weight, z)
        if bias is not None:
            z.add_(bias)
        self.objective.transform.forward_(z, kept)
        return z, kept

    def fold(self, z: torch.Tensor, labels: torch.Tensor, at_least: torch.Tensor | None = None) -> torch.Tensor:
        """
        The statistics of z alone; z becomes exp(z - largest).

        Arguments:
            labels: `[n]`, int64, relative to the block's first entry; those outside of it are elsewhere's.
            at_least: `[n]`, taken for the largest where the block's own is smaller.
        """
        statistics = empty_statistics(z.shape[0], z)
        if z.numel():
            here, at = within(labels, z.shape[1])
            smoothing = self.objective.label_smoothing
            target = torch.where(here, z.gather(1, at).squeeze(1), 0.0).mul_(1.0 - smoothing)
            if smoothing:
                target.add_(z.sum(1), alpha=smoothing / self.objective.vocab_size)
            statistics[:, TARGET] = target
            largest = z.amax(1) if at_least is None else torch.maximum(z.amax(1), at_least)
            statistics[:, LARGEST] = largest
            statistics[:, SUM] = z.sub_(largest[:, None]).exp_().sum(1)
        return statistics

    def gradient(self, z: torch.Tensor, kept: Any, slopes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """z, which is consumed -> the projected logits' gradient, times `products.unit`, in the dtype of sums."""
        if not z.numel():
            return z
        objective, unit = self.objective, self.products.unit * self.objective.transform.scale
        largest, factor, weight = (column[:, None] for column in slopes.unbind(1))
        z.sub_(largest).exp_().mul_(factor * unit)
        if objective.label_smoothing:
            z.sub_(weight * (objective.label_smoothing * unit / objective.vocab_size))
        here, at = within(labels, z.shape[1])
        z.scatter_add_(1, at, torch.where(here[:, None], weight * ((objective.label_smoothing - 1.0) * unit), 0.0))
        return objective.transform.backward_(z, kept)


def within(labels: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the labels are in [0, `columns`), and a valid column for every one, `[n, 1]`."""
    return (labels >= 0) & (labels < columns), labels.clamp(0, columns - 1).unsqueeze(1)
