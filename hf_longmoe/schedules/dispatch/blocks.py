"""Two ways to run the experts of one wave, forward and backward, on rows sorted by expert.

`GatedMLP` writes out the backward of the standard gated MLP and frees each intermediate as soon as it is dead.
`ModelKernel` runs whatever kernel the model uses, on the range of experts in the wave, through autograd.

Shapes: r rows of a wave, H hidden size, I expert width, E experts, b bytes per element. Both give the experts' outputs
before the routing weights, which the schedule multiplies in at least float32, as the stock kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from hf_longmoe.schedules.dispatch.clone import bare_clone
from hf_longmoe.schedules.dispatch.gradients import WeightGradients
from hf_longmoe.schedules.dispatch.low_rank import Factors, effective
from hf_longmoe.schedules.dispatch.plan import Segment, Wave
from hf_longmoe.schedules.numerics import accumulation_dtype
from hf_longmoe.schedules.rehearsal import each

__all__ = ["Block", "GatedMLP", "ModelKernel", "parts", "row_slices"]

Params = Sequence[torch.Tensor]
_SLICE = 2**18  # elements of an element-wise pass at a time: they stay in cache


def row_slices(rows: int, width: int) -> Iterator[slice]:
    """
    Slices of `rows` of `width` elements: a quarter of a million elements, and an eighth of the rows, at most.

    An element-wise pass has up to four temporaries of a slice: half as much as its rows.
    """
    step = max(1, min(_SLICE // max(width, 1), -(-rows // 8)))
    slices = (slice(start, min(start + step, rows)) for start in range(0, rows, step))
    yield from each(slices, kind=_length)


def _length(part: slice) -> int:
    return part.stop - part.start


class Block(Protocol):
    """What a schedule needs of the experts."""

    stacked: tuple[bool, ...]

    def bytes_per_row(self, hidden: int, params: Params) -> int:
        """Bytes of one row in flight, in the direction that needs most."""

    def max_experts(self, params: Params, budget: int) -> int | None:
        """How many consecutive experts one wave may span, or `None` for any number."""

    def beside_rows(self, params: Params, budget: int) -> int:
        """Bytes that backward may hold beside the rows in flight, and so beside `budget`."""

    def forward(self, x: torch.Tensor, wave: Wave, params: Params) -> torch.Tensor:
        """Rows `x [r, H]`, which may be overwritten -> outputs `[r, H]`."""

    def backward(
        self, x: torch.Tensor, g: torch.Tensor, w: torch.Tensor, wave: Wave, params: Params, grads: WeightGradients
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Rows `x [r, H]`, gradients `g [r, H]` of the weighted outputs, routing weights `w [r]` -> gradients of `x` and
        `w`; both inputs may be overwritten, and the parameters' gradients are added to `grads`.
        """


@dataclass(frozen=True)
class GatedMLP:
    """
    `down(act(gate(x)) * up(x))`, parameters `(gate_up [E, 2I, H], down [E, H, I])`, or `(gate, up, down)`.

    With m the gated activation, `w` a row's routing weight and `g` its output gradient: the gradient of `w` is
    `(g @ down) · m`, so backward does not need the output, a third of the recomputed forward; and `w` enters the
    gradients of `down` and of `m`, which are I wide, not that of the output. Bytes of a row in flight: forward
    (H + 2I)·b, backward (2H + 4I)·b, each with the temporaries of a slice, max(H, I)·a/2 (a: the bytes of
    `accumulation_dtype`). It computes in the weights' dtype also under autocast, as `grouped_mm` does.

    Arguments:
        act: the element-wise activation.
        silu: whether `act` is SiLU, whose backward torch has as one kernel.
        fused: whether gate and up are one parameter; else they are `gate [E, I, H]` and `up [E, I, H]`.
    """

    act: Callable[[torch.Tensor], torch.Tensor]
    silu: bool = False
    fused: bool = True

    @property
    def stacked(self) -> tuple[bool, ...]:
        return (True,) * (2 if self.fused else 3)

    def bytes_per_row(self, hidden: int, params: Params) -> int:
        width, dtype = params[-1].shape[2], params[-1].dtype
        temporaries = max(hidden, width) * accumulation_dtype(dtype).itemsize // 2
        return (2 * hidden + 4 * width) * dtype.itemsize + temporaries

    def max_experts(self, params: Params, budget: int) -> int | None:
        return None

    def beside_rows(self, params: Params, budget: int) -> int:
        return 0

    def forward(self, x: torch.Tensor, wave: Wave, params: Params) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self._forward(x, wave, params)

    def backward(
        self, x: torch.Tensor, g: torch.Tensor, w: torch.Tensor, wave: Wave, params: Params, grads: WeightGradients
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            return self._backward(x, g, w, wave, params, grads)

    def _inputs(self, params: Params) -> list[slice]:
        """Of each parameter but the last: its part of the hidden layer's 2I columns."""
        width = params[-1].shape[2]
        return [slice(0, 2 * width)] if self.fused else [slice(0, width), slice(width, 2 * width)]

    def _hidden(self, x: torch.Tensor, wave: Wave, params: Params) -> torch.Tensor:
        hidden = x.new_empty(x.shape[0], 2 * params[-1].shape[2])
        for segment, part in parts(wave):
            for param, columns in zip(params, self._inputs(params), strict=False):
                torch.mm(x[part], param[segment.expert].T, out=hidden[part, columns])
        return hidden

    def _forward(self, x: torch.Tensor, wave: Wave, params: Params) -> torch.Tensor:
        down, hidden = params[-1], self._hidden(x, wave, params)
        width = down.shape[2]
        gate, up = hidden.split(width, dim=1)
        for part in row_slices(x.shape[0], width):
            torch.mul(self.act(gate[part]), up[part], out=gate[part])
        for segment, part in parts(wave):
            torch.mm(gate[part], down[segment.expert].T, out=x[part])
        return x

    def _backward(
        self, x: torch.Tensor, g: torch.Tensor, w: torch.Tensor, wave: Wave, params: Params, grads: WeightGradients
    ) -> tuple[torch.Tensor, torch.Tensor]:
        down, hidden = params[-1], self._hidden(x, wave, params)
        rows, width = x.shape[0], down.shape[2]
        w = w.to(accumulation_dtype(x.dtype))
        gate, up = hidden.split(width, dim=1)
        gated, grad = x.new_empty(rows, width), x.new_empty(rows, width)
        for part in row_slices(rows, width):
            torch.mul(self.act(gate[part]), up[part], out=gated[part])
        for segment, part in parts(wave):
            torch.mm(g[part], down[segment.expert], out=grad[part])
        grad_w = torch.empty_like(w)
        for part in row_slices(rows, width):
            torch.sum(grad[part].to(w.dtype).mul(gated[part]), dim=1, out=grad_w[part])
            gated[part] = gated[part] * w[part, None]
        for segment, part in parts(wave):
            grads.add_product(len(params) - 1, segment, g[part], gated[part])
        del gated
        for part in row_slices(rows, width):
            self._gate_backward(gate[part], up[part], grad[part] * w[part, None])
        del grad
        for segment, part in parts(wave):
            for i, columns in enumerate(self._inputs(params)):
                grads.add_product(i, segment, hidden[part, columns], x[part])
                if i == 0:
                    torch.mm(hidden[part, columns], params[i][segment.expert], out=g[part])
                else:
                    g[part].addmm_(hidden[part, columns], params[i][segment.expert])
        return g, grad_w

    def _gate_backward(self, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> None:
        """Overwrites `gate` and `up` by their gradients; `grad` is that of their product, in at least float32."""
        grad_act = (grad * up).to(gate.dtype)
        if self.silu:
            act, grad_gate = self.act(gate), torch.ops.aten.silu_backward(grad_act, gate)
        else:
            with torch.enable_grad():
                leaf = gate.detach().clone().requires_grad_()
                act = self.act(leaf)
            (grad_gate,) = torch.autograd.grad(act, leaf, grad_act)
        torch.mul(grad, act.detach(), out=grad)
        up.copy_(grad)
        gate.copy_(grad_gate)


@dataclass(frozen=True)
class ModelKernel:
    """
    The model's own kernel on a range of experts, one row a token, through autograd.

    A shallow clone of the experts module is run whose stacked parameters are narrowed to the experts of the wave, so
    that neither its time nor its gradients touch the others. Autograd returns the gradients of that range as a
    temporary beside the rows, and so beside the budget: of as many experts as a quarter of the budget holds, and of
    one however small the budget is. While it adds up a parameter's gradient there are two of that (`beside_rows`).

    Arguments:
        module: the experts module, called by its class as `forward(x [r, H], index [r, 1], weight [r, 1])`.
        names: its parameters' names, in the order of `params`.
        stacked: for each, whether its first dimension is the experts.
        own_gate: whether the gate is other than `act(gate) * up`.
        gathers_weights: whether the kernel copies a row's expert for every row, as `batched_mm` does.
        low_rank: what is added to the weights; factors stand in `params` after the module's own. The kernel gets the
            sums, of the experts of the wave, which then count double.
    """

    module: nn.Module
    names: tuple[str, ...]
    stacked: tuple[bool, ...]
    own_gate: bool = False
    gathers_weights: bool = False
    low_rank: tuple[Factors, ...] = ()

    def bytes_per_row(self, hidden: int, params: Params) -> int:
        own = zip(params[: len(self.names)], self.stacked, strict=False)
        matrices = [p.shape[1:] for p, stacked in own if stacked and p.dim() == 3]
        widths = [a if b == hidden else b for a, b in matrices]
        size = max(p.element_size() for p in params)
        # Counted (tests/schedules/dispatch/test_bytes.py): 6H + 4I for `grouped_mm` with the standard gate, whose
        # matrices are 2I and I wide; a gate of its own saves up to eight more products.
        row = 6 * hidden + sum(widths) + min(widths) * (9 if self.own_gate else 1)
        return row * size + 2 * self.gathers_weights * self._expert_bytes(params)

    def max_experts(self, params: Params, budget: int) -> int | None:
        return max(1, budget // 4 // max(self._expert_bytes(params), 1))

    def beside_rows(self, params: Params, budget: int) -> int:
        experts = min(self.max_experts(params, budget), params[self.stacked.index(True)].shape[0])
        return experts * (self._expert_bytes(params) + max(self._sizes(params)))

    def _expert_bytes(self, params: Params) -> int:
        return sum(self._sizes(params)) * (2 if self.low_rank else 1)

    def _sizes(self, params: Params) -> list[int]:
        """Bytes of one expert's part of each stacked parameter."""
        return [p[0].numel() * p.element_size() for p, stacked in zip(params, self.stacked, strict=True) if stacked]

    def _narrow(self, wave: Wave, params: Params) -> list[torch.Tensor]:
        first, last = wave.experts[0], wave.experts[-1]
        return [p[first : last + 1] if stacked else p for p, stacked in zip(params, self.stacked, strict=True)]

    def _call(self, x: torch.Tensor, wave: Wave, params: Params) -> torch.Tensor:
        clone = bare_clone(self.module)
        clone.num_experts = len(wave.experts)
        for name, child in self.module.named_children():
            if "forward" in vars(child):  # one set on the instance may hook parameters: not those of a wave
                clone._modules[name] = bare_clone(child)
        index = torch.empty(x.shape[0], 1, dtype=torch.int64, device=x.device)
        for segment, part in parts(wave):
            index[part] = segment.expert - wave.experts[0]
        inputs = (x, index, x.new_ones(x.shape[0], 1))
        weights = dict(zip(self.names, params, strict=False))
        for i in {factors.weight: None for factors in self.low_rank}:
            found = [factors for factors in self.low_rank if factors.weight == i]
            weights[self.names[i]] = effective(params[i], found, params)
        return torch.func.functional_call(clone, weights, inputs)

    def forward(self, x: torch.Tensor, wave: Wave, params: Params) -> torch.Tensor:
        return self._call(x, wave, self._narrow(wave, params))

    def backward(
        self, x: torch.Tensor, g: torch.Tensor, w: torch.Tensor, wave: Wave, params: Params, grads: WeightGradients
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = [grad is not None for grad in grads.grads]
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            params = [
                p.detach().requires_grad_(want) for p, want in zip(self._narrow(wave, params), wanted, strict=True)
            ]
            y = self._call(x, wave, params)
        w = w.to(accumulation_dtype(x.dtype))
        grad_w = torch.empty_like(w)
        for part in row_slices(*g.shape):
            torch.sum(g[part].to(w.dtype).mul(y.detach()[part]), dim=1, out=grad_w[part])
            g[part] = g[part] * w[part, None]
        leaves = [x, *(p for p in params if p.requires_grad)]
        grad_x, *found = torch.autograd.grad(y, leaves, g.to(y.dtype), allow_unused=True, materialize_grads=True)
        del y, g
        values = iter(found)
        for i in range(len(params)):
            if wanted[i]:
                value = next(values)
                if not self.stacked[i]:
                    grads.grads[i].add_(value)
                else:
                    for segment in wave.segments:
                        grads.add(i, segment, value[segment.expert - wave.experts[0]])
        return grad_x, grad_w


def parts(wave: Wave) -> Iterator[tuple[Segment, slice]]:
    """Each expert's segment, and which of the wave's rows it is."""
    for segment in each(wave.segments, kind=Segment.kind):
        yield segment, slice(segment.start - wave.start, segment.stop - wave.start)
