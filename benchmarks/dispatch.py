"""
One block's experts, checkpointed, fp32: waves under a byte budget against Transformers' `grouped_mm`.

Both run the same experts module of Transformers on the same rows, inside torch's non-reentrant checkpointing. The
last baseline is token chunks, each checkpointed by itself: the usual way to bound this peak.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks.case import Case, Growth, Problem
from hf_longmoe.integrations.transformers.experts import block_of
from hf_longmoe.schedules.dispatch import LocalDispatch
from hf_longmoe.schedules.replay import checkpoint_once
from hf_longmoe.sizes import parse_bytes

__all__ = ["ExpertsSizes", "cases"]

_REFERENCE_TOKENS = 2048  # of the float64 step at a time; its sums do not depend on it at this precision


@dataclass(frozen=True, kw_only=True)
class ExpertsSizes:
    """
    Arguments:
        model (`str`): `"mixtral"` or `"qwen3_moe"`: whose experts module.
        tokens, hidden, width, experts, top_k (`int`): T, H, I, E, k.
        budget (`str`): of our schedule.
        kernel (`str`, defaults to `"auto"`): `"model"`: our waves through the model's `grouped_mm`.
        one_expert (`bool`, defaults to `False`): send all rows to the first expert.
        chunk (`int`, *optional*): tokens of a chunk of the baseline; all at once by default.
    """

    model: str
    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    budget: str
    kernel: str = "auto"
    one_expert: bool = False
    chunk: int | None = None

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    def label(self) -> str:
        return f"T {self.tokens}, H {self.hidden}, I {self.width}, E {self.experts}, k {self.top_k}, {self.budget}"

    def build(self) -> Problem:
        torch.manual_seed(0)
        experts = self._experts()
        x = torch.randn(self.tokens, self.hidden, requires_grad=True)
        weights, index = torch.softmax(torch.randn(self.tokens, self.experts), -1).topk(self.top_k)
        weights = weights.contiguous().requires_grad_()
        if self.one_expert:
            index = torch.zeros_like(index)
        upstream = torch.randn_like(x)

        schedule = LocalDispatch(parse_bytes(self.budget, "budget"), output_saved_after=False)
        block, params = block_of(experts, self.kernel)

        def baseline() -> torch.Tensor:
            size = self.chunk or self.tokens
            outputs = [
                checkpoint(experts, *rows, use_reentrant=False)
                for rows in zip(x.split(size), index.split(size), weights.split(size), strict=True)
            ]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        def ours() -> torch.Tensor:
            def layer(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
                return schedule(x, index, weights, block, params)

            return checkpoint(checkpoint_once(layer), x, index, weights, use_reentrant=False)

        def reference() -> list[torch.Tensor]:
            return _in_float64(experts, x, index, weights, upstream)

        return Problem([x, weights, index, *experts.parameters()], upstream, baseline, ours, reference)

    def _experts(self) -> nn.Module:
        if self.model == "mixtral":
            config = MixtralConfig(
                hidden_size=self.hidden, intermediate_size=self.width, num_local_experts=self.experts
            )
            kind = MixtralExperts
        else:
            config = Qwen3MoeConfig(
                hidden_size=self.hidden, moe_intermediate_size=self.width, num_experts=self.experts
            )
            kind = Qwen3MoeExperts
        config._experts_implementation = "grouped_mm"
        experts = kind(config)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
        return experts


def _in_float64(
    experts: nn.Module, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, upstream: torch.Tensor
) -> list[torch.Tensor]:
    experts = copy.deepcopy(experts).double()
    experts.config._experts_implementation = "eager"  # `grouped_mm` refuses float64
    x, weights = (tensor.detach().double().requires_grad_() for tensor in (x, weights))
    outputs = []
    for start in range(0, x.shape[0], _REFERENCE_TOKENS):
        part = slice(start, start + _REFERENCE_TOKENS)
        output = experts(x[part], index[part], weights[part])
        output.backward(upstream[part].double())
        outputs.append(output.detach())
    return [torch.cat(outputs), x.grad, weights.grad, *(parameter.grad for parameter in experts.parameters())]


def cases(quick: bool) -> list[Case]:
    """The cases; `quick`: the same at a fraction of the size, without limits."""
    coarse = ExpertsSizes(model="mixtral", tokens=16384, hidden=512, width=1024, experts=8, top_k=2, budget="48MiB")
    fine = ExpertsSizes(model="qwen3_moe", tokens=8192, hidden=512, width=256, experts=64, top_k=8, budget="24MiB")
    if quick:
        coarse = replace(coarse, tokens=256, hidden=64, width=128, budget="384KiB")
        fine = replace(fine, tokens=64, hidden=64, width=32, budget="192KiB")
    longer = replace(coarse, tokens=4 * coarse.tokens)
    small = replace(coarse, tokens=coarse.tokens // 64)
    growth = Growth(case=coarse.label(), unit="row", units=longer.rows - coarse.rows, bytes_per_unit=24)
    found = [
        Case(name=coarse.label(), sizes=coarse, limits={"peak_saved": 0.90, "cpu_ratio": 1.05}, gate=True),
        Case(name=fine.label(), sizes=fine, limits={"peak_saved": 0.95, "cpu_ratio": 1.0}, gate=True),
        Case(
            name=f"{coarse.label()}, through the model's kernel",
            sizes=replace(coarse, kernel="model"),
            limits={"peak_saved": 0.90, "cpu_ratio": 1.10},
            gate=True,
        ),
        Case(
            name=f"{coarse.label()}, all rows to one expert",
            sizes=replace(coarse, one_expert=True),
            limits={"peak_saved": 0.90, "cpu_ratio": 1.05},
            gate=True,
        ),
        Case(name=longer.label(), sizes=longer, gate=True, timed=False, grows_from=growth),
        Case(name=f"{coarse.label()}, against token chunks", sizes=replace(coarse, chunk=coarse.tokens // 4)),
        Case(name=small.label(), sizes=small),
    ]
    return [replace(case, limits={}, gate=False) for case in found] if quick else found
