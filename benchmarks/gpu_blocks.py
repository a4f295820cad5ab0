"""The blocks of `python -m benchmarks gpu`: a layer's experts, and the head with its loss, at the paper's widths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from benchmarks.dispatch import ExpertsSizes
from benchmarks.gpu_measure import DeviceProblem
from benchmarks.vocab import HeadSizes

__all__ = ["DeviceExpertsSizes", "DeviceHeadSizes"]

_TOKENS, _ROWS = 256, 64  # tokens, and rows of the head's weight, that are compared
_STRIP = 4096  # rows of the head's weight in float64 at once
_FEWEST = 1024  # tokens; below that widths shrink


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True, kw_only=True)
class DeviceExpertsSizes(ExpertsSizes):
    """As `ExpertsSizes`, in bfloat16. Compared are the first tokens, and the gradients of the first expert."""

    def label(self) -> str:
        return f"dispatch: {super().label()}, bfloat16, against grouped_mm"

    def needs(self) -> tuple[int, int]:
        weights = 3 * self.experts * self.width * self.hidden
        # Forward and backward of grouped_mm: about six rows of each width. Float64: one expert, with its gradients.
        rows = self.rows * 6 * (self.hidden + self.width)
        return 2 * (2 * weights + rows) + 8 * 8 * weights // self.experts + 2**30, 0

    def smaller(self) -> DeviceExpertsSizes | None:
        if self.tokens > _FEWEST:
            return replace(self, tokens=self.tokens // 2)
        return replace(self, experts=self.experts // 2) if self.experts >= 2 * self.top_k else None

    def build(self) -> DeviceProblem:
        with _default_dtype(torch.bfloat16):
            stock = super().build()
        x, weights, index, gate_up, down = stock.given
        some = min(_TOKENS, self.tokens)

        def compared(side: str, output: torch.Tensor) -> list[torch.Tensor]:
            return [output[:some], x.grad[:some], weights.grad[:some], gate_up.grad[0], down.grad[0]]

        def reference() -> list[torch.Tensor]:
            first = torch.arange(some, device=x.device)
            output, x_grad, weights_grad = (torch.zeros_like(t[:some], dtype=torch.float64) for t in (x, x, weights))
            for expert in range(self.experts):
                tokens, slots = (index[:some] == expert).nonzero(as_tuple=True)
                if tokens.numel():
                    y, (dx, dw, _, _) = _one_expert(expert, first[tokens], slots)
                    output.index_add_(0, tokens, y)
                    x_grad.index_add_(0, tokens, dx)
                    weights_grad[tokens, slots] = dw
            _, (_, _, *whole) = _one_expert(0, *(index == 0).nonzero(as_tuple=True))
            return [output, x_grad, weights_grad, *whole]

        def _one_expert(
            expert: int, tokens: torch.Tensor, slots: torch.Tensor
        ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            """In float64: its part of the output of these rows, and the gradients of their inputs and of its own."""
            operands = (x[tokens], weights[tokens, slots], gate_up[expert], down[expert])
            rows, factor, up_weight, down_weight = (t.detach().double().requires_grad_() for t in operands)
            gate, up = F.linear(rows, up_weight).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, down_weight) * factor[:, None]
            wanted = (rows, factor, up_weight, down_weight)
            return y.detach(), torch.autograd.grad(y, wanted, stock.upstream[tokens].double())

        return DeviceProblem(
            stock.given,
            stock.upstream,
            stock.baseline,
            stock.ours,
            reference,
            compared=compared,
            against=f"float64, of the first {some} tokens and of expert 0's weights",
        )


@dataclass(frozen=True, kw_only=True)
class DeviceHeadSizes(HeadSizes):
    """As `HeadSizes`. Compared are the loss, the first tokens' gradients, and those of the weight's first rows."""

    def label(self) -> str:
        dtype = ", float32" if self.dtype == torch.float32 else ""
        baseline = "torch's linear_cross_entropy" if self.torch_op else "linear and cross_entropy"
        return f"vocab: {super().label()}{dtype}, against {baseline}"

    def needs(self) -> tuple[int, int]:
        size, half = self.dtype.itemsize, self.dtype != torch.float32
        weight, logits, hidden = self.vocab * self.hidden, self.tokens * self.vocab, self.tokens * self.hidden
        # Logits, log-softmax and gradient in float32, those in half precision; or our gradient's float32 sums.
        stock = logits * (12 + (size if half else 0))
        exact = 24 * (hidden + self.tokens * _STRIP + _STRIP * self.hidden)
        return max(weight * 2 * size + max(stock, 4 * weight), exact + weight * size) + 4 * size * hidden + 2**30, 0

    def smaller(self) -> DeviceHeadSizes | None:
        if self.tokens > _FEWEST:
            return replace(self, tokens=self.tokens // 2)
        return replace(self, hidden=self.hidden // 2) if self.hidden > 512 else None

    def build(self) -> DeviceProblem:
        stock = super().build()
        hidden, weight, labels = stock.given
        some, rows = min(_TOKENS, self.tokens), min(_ROWS, self.vocab)

        def baseline() -> torch.Tensor:
            return stock.baseline().float()

        def compared(side: str, output: torch.Tensor) -> list[torch.Tensor]:
            return [output, hidden.grad[:some], weight.grad[:rows]]

        return DeviceProblem(
            stock.given,
            torch.ones((), device=hidden.device),
            baseline,
            stock.ours,
            lambda: _head_in_float64(hidden.detach(), weight.detach(), labels, some, rows),
            compared=compared,
            against=f"float64, of the loss, the first {some} tokens and the weight's first {rows} rows",
        )


def _head_in_float64(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, some: int, rows: int
) -> list[torch.Tensor]:
    """The loss, the first `some` rows of its gradient for `hidden`, and the first `rows` of that for `weight`."""
    tokens, exact = len(labels), hidden.double()
    lse = torch.full((tokens,), -torch.inf, dtype=torch.float64, device=hidden.device)
    for strip in weight.split(_STRIP):
        torch.logaddexp(lse, F.linear(exact, strip.double()).logsumexp(1), out=lse)
    target = torch.cat(
        [
            (part * weight[wanted].double()).sum(1)
            for part, wanted in zip(exact.split(_STRIP), labels.split(_STRIP), strict=True)
        ]
    )
    hidden_grad = -weight[labels[:some]].double()
    for strip in weight.split(_STRIP):
        wide = strip.double()
        hidden_grad += torch.exp(F.linear(exact[:some], wide) - lse[:some, None]) @ wide
    slope = torch.exp(F.linear(exact, weight[:rows].double()) - lse[:, None])
    slope -= (labels[:, None] == torch.arange(rows, device=labels.device)).double()
    return [(lse - target).mean(), hidden_grad / tokens, slope.T @ exact / tokens]
