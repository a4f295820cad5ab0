"""A third way to run the experts of a wave: two projections with low-rank additions, backward written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hf_longmoe.schedules.dispatch.blocks import parts, row_slices
from hf_longmoe.schedules.dispatch.gradients import WeightGradients
from hf_longmoe.schedules.dispatch.low_rank import Projection
from hf_longmoe.schedules.dispatch.plan import Wave
from hf_longmoe.schedules.numerics import accumulation_dtype

__all__ = ["AdaptedMLP"]

Params = Sequence[torch.Tensor]
_GATE = 12  # tensors as wide as the gated activation that a gate and its backward hold at most, of a slice


@dataclass(frozen=True)
class AdaptedMLP:
    """
    `down(gate(up(x)))`, each projection with its bias, its layout and its `LowRank`s; see `Projection`.

    Frozen weights get no gradient and no product for one. As in `GatedMLP`, a routing weight enters the gradients of
    `down` and of the gate, not that of the output. Bytes of a row in flight, with U the width that `up` gives and r
    the largest rank: (2H + U + 2I + 2r)·b, and the temporaries of a slice. Beside the rows: one expert's factors.

    Arguments:
        gate: `[n, U]` -> `[n, I]`, row by row; differentiated by autograd, a slice at a time.
        up, down: the projections.
        count: of the block's parameters, factors included; all are stacked.
    """

    gate: Callable[[torch.Tensor], torch.Tensor]
    up: Projection
    down: Projection
    count: int

    @property
    def stacked(self) -> tuple[bool, ...]:
        return (True,) * self.count

    def bytes_per_row(self, hidden: int, params: Params) -> int:
        dtype = params[self.down.weight].dtype
        width, up_width = self.down.widths(params)[0], self.up.widths(params)[1]
        rank = max(self.up.rank(params), self.down.rank(params))
        temporaries = max(4 * hidden, 2 * up_width + _GATE * width) * accumulation_dtype(dtype).itemsize // 8
        return (2 * hidden + up_width + 2 * width + 2 * rank) * dtype.itemsize + temporaries

    def max_experts(self, params: Params, budget: int) -> int | None:
        return None

    def beside_rows(self, params: Params, budget: int) -> int:
        factors = (*self.up.low_rank, *self.down.low_rank)
        sizes = (params[f.a][0].numel() + params[f.b][0].numel() for f in factors)
        return 2 * max(sizes, default=0) * accumulation_dtype(params[self.down.weight].dtype).itemsize

    def forward(self, x: torch.Tensor, wave: Wave, params: Params) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            hidden = self._hidden(x, wave, params)
            width = self.down.widths(params)[0]
            for part in row_slices(x.shape[0], width):
                hidden[part, :width] = self.gate(hidden[part])
            for segment, part in parts(wave):
                self.down.forward(hidden[part, :width], segment.expert, params, x[part])
            return x

    def backward(
        self, x: torch.Tensor, g: torch.Tensor, w: torch.Tensor, wave: Wave, params: Params, grads: WeightGradients
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            return self._backward(x, g, w.to(accumulation_dtype(x.dtype)), wave, params, grads)

    def _backward(
        self, x: torch.Tensor, g: torch.Tensor, w: torch.Tensor, wave: Wave, params: Params, grads: WeightGradients
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = x.shape[0], self.down.widths(params)[0]
        hidden = self._hidden(x, wave, params)
        gated, grad = x.new_empty(rows, width), x.new_empty(rows, width)
        for part in row_slices(rows, width):
            gated[part] = self.gate(hidden[part])
        for segment, part in parts(wave):
            self.down.input_gradient(g[part], segment.expert, params, grad[part])
        grad_w = torch.empty_like(w)
        for part in row_slices(rows, width):
            torch.sum(grad[part].to(w.dtype).mul(gated[part]), dim=1, out=grad_w[part])
            gated[part] = gated[part] * w[part, None]
        for segment, part in parts(wave):
            self._bias_of_weight(g[part], segment.expert, params, grad_w[part])
            self.down.weight_gradients(gated[part], g[part], segment, params, grads, w[part])
        del gated
        for part in row_slices(rows, width):
            hidden[part] = self._gate_backward(hidden[part], grad[part] * w[part, None])
        del grad
        for segment, part in parts(wave):
            self.up.weight_gradients(x[part], hidden[part], segment, params, grads)
            self.up.input_gradient(hidden[part], segment.expert, params, g[part])
        return g, grad_w

    def _hidden(self, x: torch.Tensor, wave: Wave, params: Params) -> torch.Tensor:
        hidden = x.new_empty(x.shape[0], self.up.widths(params)[1])
        for segment, part in parts(wave):
            self.up.forward(x[part], segment.expert, params, hidden[part])
        return hidden

    def _bias_of_weight(self, g: torch.Tensor, expert: int, params: Params, grad_w: torch.Tensor) -> None:
        """What the outputs' bias adds to the routing weights' gradient."""
        if self.down.bias is not None:
            bias = params[self.down.bias][expert].to(grad_w.dtype)
            for part in row_slices(*g.shape):
                grad_w[part].addmv_(g[part].to(grad_w.dtype), bias)

    def _gate_backward(self, hidden: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            gated = self.gate(leaf)
        return torch.autograd.grad(gated, leaf, grad.to(gated.dtype))[0]
