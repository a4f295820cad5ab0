"""One tile of logits at a time: the workspace every tile reuses, and the gradients every tile adds to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_longmoe.schedules.numerics import accumulation_dtype, autocast_dtype
from hf_longmoe.schedules.rehearsal import each
from hf_longmoe.schedules.vocab.labels import ValidTokens
from hf_longmoe.schedules.vocab.logits import LogitTransform
from hf_longmoe.schedules.vocab.products import choose_products

LowRank = tuple[torch.Tensor | None, torch.Tensor | None]

__all__ = ["Head", "HeadGradients", "HeadPlan", "operand_dtype"]


def operand_dtype(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype:
    """
    The dtype that enters the products: what `torch.nn.functional.linear` would use, autocast included.

    Raises:
        `ValueError`: dtypes differ and no autocast reconciles them.
    """
    dtypes = [tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None]
    autocast = autocast_dtype(hidden.device)
    if autocast is not None and torch.float64 not in dtypes:  # which autocast leaves alone
        return autocast
    if len(set(dtypes)) > 1:
        names = ", ".join(
            f"{name} {str(dtype).removeprefix('torch.')}"
            for name, dtype in zip(("hidden", "weight", "bias"), dtypes, strict=False)
        )
        raise ValueError(f"dtypes differ ({names}): cast to one dtype, or run under torch.autocast.")
    return dtypes[0]


class HeadGradients:
    """
    dh, dW and db in the accumulation dtype; `None` for what needs no gradient, which costs no work and no memory.

    Arguments:
        hidden: [T, H], `weight`: [V, H], `bias`: [V] or `None`.
        needs: whether hidden, weight, bias and each of `low_rank` need a gradient.
        valid: the tokens that take part. With none, or with ignored ones, what no tile writes is zero.
        low_rank: ([T, r], [V, r]) of `Head`, or (`None`, `None`).
        vocab_size: how many of the V entries the tiles have, the first ones; the others' gradients are zeros.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needs: tuple[bool, ...],
        valid: ValidTokens,
        low_rank: LowRank = (None, None),
        vocab_size: int | None = None,
    ) -> None:
        wide = accumulation_dtype(weight.dtype)
        cut = vocab_size is not None and vocab_size < weight.shape[0]
        self.valid = valid
        self.first = True
        zeros, empty = torch.zeros_like, torch.empty_like
        contiguous = torch.contiguous_format
        make_dh = empty if valid.index is None else zeros
        make_dw = empty if valid.count and not cut else zeros
        self.dh = make_dh(hidden, dtype=wide, memory_format=contiguous) if needs[0] else None
        self.dw = make_dw(weight, dtype=wide, memory_format=contiguous) if needs[1] else None
        self.db = zeros(bias, dtype=wide) if bias is not None and needs[2] else None
        self.du, self.dv = (
            zeros(factor, dtype=wide, memory_format=contiguous) if factor is not None and need else None
            for factor, need in zip(low_rank, needs[3:] or (False, False), strict=True)
        )
        self._whole: dict[str, torch.Tensor | None] = {}
        for name in ("dw", "db", "dv") if cut else ():
            self._whole[name] = whole = getattr(self, name)
            setattr(self, name, None if whole is None else whole[:vocab_size])

    def whole(self, name: str) -> torch.Tensor | None:
        """ "dh", "dw", "db", "du" or "dv", of all V entries."""
        return self._whole.get(name, getattr(self, name))

    def drop(self, name: str) -> None:
        """Hands it over."""
        self._whole.pop(name, None)
        setattr(self, name, None)


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """
    What a call decides before it runs.

    Arguments:
        valid: the tokens that take part.
        rows: tokens of a tile at most.
        dtype: what enters the products.
        keep_logits: whether gradients, or statistics, need the logits beside the probabilities.
        transform: scale and soft cap of the logits.
    """

    valid: ValidTokens
    rows: int
    dtype: torch.dtype
    keep_logits: bool
    transform: LogitTransform


class Head:
    """
    The projection of tiles of at most `plan.rows` valid tokens.

    Logits, probabilities and gradient of a tile share one [rows, V] buffer; a second one keeps the logits if a soft
    cap or statistics ask for them.

    Arguments:
        hidden: [T, H]; `weight`: [V, H]; `bias`: [V] or `None`; any of them is cast to `plan.dtype` if it has another.
        keep_logits: `plan.keep_logits` if not given.
        low_rank: u [T, r] and v [V, r], of which u · vᵀ is added to the projection; in the dtype of the logits.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        plan: HeadPlan,
        keep_logits: bool | None = None,
        low_rank: LowRank = (None, None),
    ) -> None:
        self.hidden, self.valid, self.transform, self.rows = hidden, plan.valid, plan.transform, plan.rows
        self.dtype = plan.dtype
        self.weight = weight.to(plan.dtype)
        self.bias = None if bias is None else bias.to(plan.dtype)
        self.products = choose_products(plan.rows, self.weight, plan.transform.scale)
        self.wide = accumulation_dtype(plan.dtype)
        self.u, self.v = (None if factor is None else factor.to(self.wide) for factor in low_rank)
        shape = (plan.rows, weight.shape[0])
        keep_logits = plan.keep_logits if keep_logits is None else keep_logits
        self.buffer = hidden.new_empty(shape, dtype=self.wide)
        self.kept = hidden.new_empty(shape, dtype=self.wide) if keep_logits else None

    def tiles(self):
        """Yields `(where, logits, kept, hidden, labels)` of each tile; consume one before asking for the next."""
        edges = [(start, min(start + self.rows, self.valid.count)) for start in range(0, self.valid.count, self.rows)]
        for start, stop in each(edges, kind=lambda edge: edge[1] - edge[0]):
            where = self.valid.where(start, stop)
            hidden = self.products.hidden(self.hidden[where].to(self.dtype))
            logits = self.buffer[: stop - start]
            kept = None if self.kept is None else self.kept[: stop - start]
            self._project(where, hidden, logits)
            self.transform.forward_(logits, kept)
            yield where, logits, kept, hidden, self.valid.labels[where].long().unsqueeze(1)

    def _project(self, where: slice | torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        self.products.logits(hidden, self.weight, logits)
        if self.bias is not None:
            logits.add_(self.bias)
        if self.v is not None:
            logits.addmm_(self.u[where], self.v.t())

    def again(self, where: slice | torch.Tensor, hidden: torch.Tensor, kept: torch.Tensor) -> None:
        """Fills `kept`, which was put to another use, with what a soft cap's backward needs of the tile."""
        self._project(where, hidden, kept)
        kept.mul_(self.transform.scale / self.transform.softcap).tanh_()

    def backward(
        self,
        gradients: HeadGradients,
        where: slice | torch.Tensor,
        gradient: torch.Tensor,
        kept: torch.Tensor | None,
        hidden: torch.Tensor,
    ) -> None:
        """
        Adds a tile to the gradients.

        Arguments:
            gradient: of the transformed logits [r, V], times the transform's `scale` and the products'
                `unit`; consumed.
            where, kept, hidden: as [`tiles`] gave them.
        """
        self.transform.backward_(gradient, kept)
        if gradients.db is not None:
            gradients.db += gradient.sum(0)
        if gradients.du is not None:
            gradients.du[where] = gradient @ self.v
        if gradients.dv is not None:
            gradients.dv.addmm_(gradient.t(), self.u[where])
        if gradients.dh is None and gradients.dw is None:
            return
        gradient = self.products.gradient(gradient)
        if gradients.dh is not None:
            if isinstance(where, slice):
                self.products.dh(gradient, self.weight, out=gradients.dh[where])
            else:
                dh = hidden.new_empty(hidden.shape, dtype=self.wide)
                self.products.dh(gradient, self.weight, out=dh)
                gradients.dh.index_copy_(0, where, dh)
        if gradients.dw is not None:
            self.products.dw(gradient, hidden, gradients.dw, gradients.first)
        gradients.first = False
