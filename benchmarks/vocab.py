"""
The vocabulary projection and its loss: tiles under a byte budget against the whole logits.

Baselines: `torch.nn.functional.linear`, an upcast to float32 and `cross_entropy`, which is what Transformers' loss
does; and torch's own chunked `linear_cross_entropy`, with its default options.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from benchmarks.case import Case, Growth, Problem
from hf_longmoe.schedules.vocab import linear_cross_entropy

__all__ = ["HeadSizes", "cases"]

_REFERENCE_TOKENS = 1024  # of the float64 step at a time; its sums do not depend on it at this precision


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """
    Arguments:
        tokens, hidden, vocab (`int`): T, H, V.
        budget (`str`): of our schedule.
        dtype (`torch.dtype`, defaults to `torch.float32`): of hidden states and weight.
        frozen (`bool`, defaults to `False`): the weight wants no gradient.
        torch_op (`bool`, defaults to `False`): the baseline is torch's chunked operator.
    """

    tokens: int
    hidden: int
    vocab: int
    budget: str
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    torch_op: bool = False

    def label(self) -> str:
        dtype = "" if self.dtype == torch.float32 else f", {str(self.dtype).removeprefix('torch.')}"
        return f"T {self.tokens}, H {self.hidden}, V {self.vocab}{dtype}, {self.budget}"

    def build(self) -> Problem:
        torch.manual_seed(0)
        hidden = torch.randn(self.tokens, self.hidden).to(self.dtype).requires_grad_()
        weight = torch.randn(self.vocab, self.hidden).mul_(self.hidden**-0.5).to(self.dtype)
        weight.requires_grad_(not self.frozen)
        labels = torch.randint(self.vocab, (self.tokens,))

        def baseline() -> torch.Tensor:
            if self.torch_op:
                options = torch.nn.LinearCrossEntropyOptions()  # without any it is the unchunked composition
                return F.linear_cross_entropy(hidden, weight, labels, options=options)
            return F.cross_entropy(F.linear(hidden, weight).float(), labels)

        def ours() -> torch.Tensor:
            return linear_cross_entropy(hidden, weight, labels, budget=self.budget)

        def reference() -> list[torch.Tensor]:
            return _in_float64(hidden, weight, labels)

        upstream = torch.ones((), dtype=self.dtype if self.torch_op else torch.float32)
        return Problem([hidden, weight, labels], upstream, baseline, ours, reference)


def _in_float64(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    leaves = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in (hidden, weight)]
    hidden, weight = leaves
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(labels), _REFERENCE_TOKENS):
        part = slice(start, start + _REFERENCE_TOKENS)
        loss = F.cross_entropy(F.linear(hidden[part], weight), labels[part], reduction="sum") / len(labels)
        loss.backward()
        total += loss.detach()
    return [total, *(leaf.grad for leaf in leaves if leaf.requires_grad)]


def cases(quick: bool) -> list[Case]:
    """The cases; `quick`: the same at a fraction of the size, without limits."""
    stock = HeadSizes(tokens=8192, hidden=512, vocab=32768, budget="64MiB")
    if quick:
        stock = HeadSizes(tokens=512, hidden=32, vocab=1024, budget="128KiB")
    longer = replace(stock, tokens=4 * stock.tokens)
    # A CPU without half-precision units takes minutes for the full size of this baseline.
    half = replace(stock, tokens=stock.tokens // 8, dtype=torch.bfloat16)
    small = replace(stock, tokens=stock.tokens // 32)
    frozen = replace(stock, tokens=stock.tokens // 4, frozen=True)
    growth = Growth(
        case=stock.label(), unit="token", units=longer.tokens - stock.tokens, bytes_per_unit=16, slack=0.02
    )
    found = [
        Case(name=stock.label(), sizes=stock, limits={"peak_saved": 0.97, "cpu_ratio": 1.0}, gate=True),
        Case(
            name=f"{stock.label()}, against torch's linear_cross_entropy",
            sizes=replace(stock, torch_op=True),
            limits={"cpu_ratio": 1.0},
            gate=True,
        ),
        Case(name=longer.label(), sizes=longer, gate=True, timed=False, grows_from=growth),
        Case(name=half.label(), sizes=half),
        Case(name=f"{frozen.label()}, frozen head", sizes=frozen),
        Case(name=small.label(), sizes=small),
    ]
    return [replace(case, limits={}, gate=False) for case in found] if quick else found
