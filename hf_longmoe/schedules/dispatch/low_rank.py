"""Low-rank additions (LoRA) to stacked expert weights, applied expert by expert and never added up for all of them.

Shapes: E experts, r the rank, n rows of one expert. With W the expert's own weight and s the scale:

    y  = x Wᵀ + s (x aᵀ) bᵀ          dx = g W + s (g b) a          da = s (g b)ᵀ x          db = s gᵀ (x aᵀ)

so a frozen W gets no product of its own in backward, and nothing of W's shape is formed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_longmoe.schedules.dispatch.gradients import WeightGradients
from hf_longmoe.schedules.dispatch.plan import Segment

__all__ = ["Factors", "LowRank", "Projection", "effective", "with_factors"]


@dataclass(frozen=True)
class LowRank:
    """
    `scale * b[e] @ a[e]`, added to the weight `[out, in]` of each expert e.

    Arguments:
        a: `[E, r, in]`, any strides; its own dtype is that of its gradient.
        b: `[E, out, r]`, likewise.
        scale: a number.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class Factors:
    """
    Where a `LowRank` stands among a block's parameters: at places `a` and `b`, for the one at `weight`.

    Arguments:
        transposed: that one is `[E, in, out]`.
    """

    weight: int
    a: int
    b: int
    scale: float
    transposed: bool = False

    def of(self, params: Sequence[torch.Tensor], expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """One expert's `a [r, in]` and `b [out, r]`, in the dtype that is computed in."""
        return params[self.a][expert].to(dtype), params[self.b][expert].to(dtype)


def with_factors(
    names: Sequence[str],
    params: Sequence[torch.Tensor],
    low_rank: Mapping[str, Sequence[LowRank]],
    transposed: bool = False,
) -> tuple[tuple[Factors, ...], tuple[torch.Tensor, ...]]:
    """
    Appends the factors to a block's parameters.

    Arguments:
        names: of the parameters, in their order.
        params: the stacked parameters.
        low_rank: what is added to them, by name; several add up.
        transposed: weights are `[E, in, out]`, not `[E, out, in]`.

    Returns:
        Where the factors stand, and all parameters.

    Raises:
        `ValueError`: a name or a shape that does not fit.
    """
    found, all_params = [], list(params)
    for name, additions in low_rank.items():
        if name not in names:
            raise ValueError(f"low_rank={name!r} names no stacked weight of these experts; they have {list(names)}.")
        shape = tuple(params[names.index(name)].shape)
        for added in additions:
            (experts, rank, inner), outer = added.a.shape, added.b.shape[1]
            needed = (experts, inner, outer) if transposed else (experts, outer, inner)
            if shape != needed or tuple(added.b.shape) != (experts, outer, rank):
                raise ValueError(
                    f"low_rank[{name!r}]: a {tuple(added.a.shape)} and b {tuple(added.b.shape)} do not fit a weight"
                    f" {shape}; give a [E, r, in] and b [E, out, r]."
                )
            place = len(all_params)
            found.append(Factors(names.index(name), place, place + 1, added.scale, transposed))
            all_params += [added.a, added.b]
    return tuple(found), tuple(all_params)


@dataclass(frozen=True)
class Projection:
    """
    A linear layer of each expert, with what is added to it. Places in a block's parameters, not tensors.

    Arguments:
        weight: the place of `[E, out, in]`, or of `[E, in, out]` if `transposed`.
        bias: the place of `[E, out]`, if there is one.
        low_rank: of this weight.
    """

    weight: int
    transposed: bool = False
    bias: int | None = None
    low_rank: tuple[Factors, ...] = ()

    def widths(self, params: Sequence[torch.Tensor]) -> tuple[int, int]:
        """(in, out)."""
        a, b = params[self.weight].shape[1:]
        return (a, b) if self.transposed else (b, a)

    def rank(self, params: Sequence[torch.Tensor]) -> int:
        """The largest."""
        return max((params[factors.a].shape[1] for factors in self.low_rank), default=0)

    def forward(self, x: torch.Tensor, expert: int, params: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Rows `x [n, in]` of one expert -> `out [n, out]`, which is overwritten."""
        torch.mm(x, self._matrix(expert, params).T, out=out)
        if self.bias is not None:
            out.add_(params[self.bias][expert])
        for factors in self.low_rank:
            a, b = factors.of(params, expert, x.dtype)
            out.addmm_(x @ a.T, b.T, alpha=factors.scale)

    def input_gradient(self, g: torch.Tensor, expert: int, params: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Gradients `g [n, out]` of the outputs -> `out [n, in]`, which is overwritten."""
        torch.mm(g, self._matrix(expert, params), out=out)
        for factors in self.low_rank:
            a, b = factors.of(params, expert, g.dtype)
            out.addmm_(g @ b, a, alpha=factors.scale)

    def weight_gradients(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        segment: Segment,
        params: Sequence[torch.Tensor],
        grads: WeightGradients,
        w: torch.Tensor | None = None,
    ) -> None:
        """
        Adds what a segment's rows contribute to the gradients that are wanted.

        Arguments:
            x: `[n, in]`, multiplied by `w` where that is given.
            g: `[n, out]`.
            w: `[n]`, what `g` lacks of the gradient of the outputs.
        """
        if grads.grads[self.weight] is not None:
            grads.add_product(self.weight, segment, *((x, g) if self.transposed else (g, x)))
        if self.bias is not None and grads.grads[self.bias] is not None:
            grads.add(self.bias, segment, g.sum(0) if w is None else w.to(g.dtype) @ g)
        for factors in self.low_rank:
            a, b = factors.of(params, segment.expert, x.dtype)
            if grads.grads[factors.b] is not None:
                grads.add_product(factors.b, segment, g, (x @ a.T).mul_(factors.scale))
            if grads.grads[factors.a] is not None:
                grads.add_product(factors.a, segment, (g @ b).mul_(factors.scale), x)

    def _matrix(self, expert: int, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """`[out, in]`."""
        weight = params[self.weight][expert]
        return weight.T if self.transposed else weight


def effective(weight: torch.Tensor, factors: Sequence[Factors], params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weights of some experts with what is added to them, for a kernel that has to have them whole; differentiable."""
    with torch.autocast(weight.device.type, enabled=False):  # a sum in the weight's own dtype, whatever follows
        for found in factors:
            a, b = params[found.a].to(weight.dtype), params[found.b].to(weight.dtype)
            left, right = (a.transpose(1, 2), b.transpose(1, 2)) if found.transposed else (b, a)
            weight = torch.baddbmm(weight, left, right, alpha=found.scale)
    return weight
