"""
Experts spread over ranks, fp32: `PipelinedLLEP` against Transformers' `AllToAllEP` with `grouped_mm`.

Both run the same experts module of Transformers on 2 or 4 gloo ranks of one thread each, inside torch's non-reentrant
checkpointing. "n waves" is the smallest budget that gives so many for that routing. In some cases stock runs once more
in our place, in the order of arXiv 2609.14306: strided chunks of tokens, each checkpointed by itself.

Peaks are the worst rank's, wall seconds the slowest's, CPU seconds all ranks'.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig
from transformers.distributed.expert_parallel import AllToAllEP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from benchmarks.case import Case, Problem
from benchmarks.routing import choose
from hf_longmoe.config import DispatchConfig
from hf_longmoe.integrations.transformers.expert_parallel import ExpertSettings, PipelinedLLEP, sizes_of
from hf_longmoe.schedules.dispatch import PipelineSizes
from hf_longmoe.schedules.dispatch.exchange import ExchangePlan, plan_exchange
from hf_longmoe.schedules.replay import checkpoint_once

__all__ = ["THREADS", "ExpertParallelSizes", "cases", "smallest_budget", "traffic"]

THREADS = 1
_REFERENCE_TOKENS = 2048  # of the float64 step at a time; its sums do not depend on it at this precision
_INDEX_BYTES = 24  # a row, of indices and routing weights, beside the bound


@dataclass(frozen=True, kw_only=True)
class ExpertParallelSizes:
    """
    Arguments:
        ranks, tokens, hidden, width, experts, top_k (`int`): P, T of each rank, H, I, E of all ranks, k.
        routing (`str`): see `benchmarks.routing.choose`.
        budget (`str`, *optional*): of our schedule.
        waves (`int`, *optional*): instead of a budget: the smallest that gives so many.
        chunks (`int`, *optional*): in the place of ours, stock in so many strided chunks of tokens.
        backward (`bool`, defaults to `True`): forward and backward, or forward alone.
    """

    ranks: int
    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    routing: str
    budget: str | None = None
    waves: int | None = None
    chunks: int | None = None
    backward: bool = True

    def label(self) -> str:
        model = f"E {self.experts}, k {self.top_k}, I {self.width}"
        if self.chunks:
            way = f"in our place stock in {self.chunks} strided chunks"
        else:
            way = self.budget or ("1 wave" if self.waves == 1 else f"{self.waves} waves")
        alone = "" if self.backward else ", forward alone"
        return f"{self.ranks} ranks, T {self.tokens}, H {self.hidden}, {model}, {self.routing}, {way}{alone}"

    def build(self) -> Problem:
        rank = distributed.get_rank()
        mesh = init_device_mesh("cpu", (self.ranks, 1), mesh_dim_names=("ep", "tp"))
        experts = self._experts(self.experts // self.ranks)
        for parameter, values in zip(experts.parameters(), self._values(rank), strict=True):
            parameter.data = values
        x, index, weights, upstream = self._inputs(rank)
        stock = AllToAllEP(experts, mesh["ep"], mesh["tp"])
        counts = self._counts(index)
        config = self._config(experts, counts)
        experts.longmoe_schedule = ExpertSettings(config, output_saved_after=False)
        pipelined = PipelinedLLEP(experts, mesh["ep"], mesh["tp"])

        def baseline() -> torch.Tensor:
            return checkpoint(stock, x, index, weights, use_reentrant=False)

        def ours() -> torch.Tensor:
            return checkpoint(checkpoint_once(pipelined), x, index, weights, use_reentrant=False)

        def chunked() -> torch.Tensor:
            return _strided_chunks(stock, (x, index, weights), self.chunks)

        def details() -> dict[str, Any]:
            if self.chunks:
                return {"chunks": self.chunks}
            sizes = sizes_of(experts, self.ranks, config)
            return {
                "budget_bytes": config.budget,
                "bound_bytes": sizes.bound + _INDEX_BYTES * self.tokens * self.top_k,
                **traffic(plan_exchange(counts, sizes.caps), sizes),
            }

        def reference() -> list[torch.Tensor]:
            return self._in_float64(rank)

        return Problem(
            [x, weights, index, *experts.parameters()],
            upstream,
            baseline,
            chunked if self.chunks else ours,
            reference,
            backward=self.backward,
            details=details,
        )

    def _inputs(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        torch.manual_seed(rank)
        x = torch.randn(self.tokens, self.hidden, requires_grad=True)
        upstream = torch.randn_like(x)
        local = self.experts // self.ranks
        index, weights = choose(self.routing, self.tokens, self.experts, self.top_k, local)
        return x, index, weights.requires_grad_(), upstream

    def _values(self, rank: int) -> list[torch.Tensor]:
        """Of the parameters of a rank's experts."""
        torch.manual_seed(1000 + rank)
        local = self.experts // self.ranks
        gate_up = torch.randn(local, 2 * self.width, self.hidden) * self.hidden**-0.5
        return [gate_up, torch.randn(local, self.hidden, self.width) * self.width**-0.5]

    def _experts(self, count: int) -> nn.Module:
        config = MixtralConfig(hidden_size=self.hidden, intermediate_size=self.width, num_local_experts=count)
        config._experts_implementation = "grouped_mm"
        experts = MixtralExperts(config)
        experts._is_expert_parallel = True
        return experts

    def _counts(self, index: torch.Tensor) -> np.ndarray:
        """`[P, E]` rows of every rank for every expert."""
        own = torch.bincount(index.reshape(-1), minlength=self.experts)
        counts = [torch.empty_like(own) for _ in range(self.ranks)]
        distributed.all_gather(counts, own)
        return torch.stack(counts).numpy()

    def _config(self, experts: nn.Module, counts: np.ndarray) -> DispatchConfig:
        if self.waves is None:
            return DispatchConfig(budget=self.budget or "256MiB")

        def waves(budget: int) -> int:
            sizes = sizes_of(experts, self.ranks, DispatchConfig(budget=budget))
            return plan_exchange(counts, sizes.caps).num_waves

        return DispatchConfig(budget=smallest_budget(waves, self.waves))

    def _in_float64(self, rank: int) -> list[torch.Tensor]:
        """This rank's tokens through all experts; the gradients of its own experts, summed over the ranks."""
        experts = self._experts(self.experts).double()
        experts.config._experts_implementation = "eager"  # `grouped_mm` refuses float64
        for parameter, *parts in zip(
            experts.parameters(), *(self._values(other) for other in range(self.ranks)), strict=True
        ):
            parameter.data = torch.cat(parts).double()
        x, index, weights, upstream = self._inputs(rank)
        x, weights = (tensor.detach().double().requires_grad_() for tensor in (x, weights))
        outputs = []
        for start in range(0, self.tokens, _REFERENCE_TOKENS):
            part = slice(start, start + _REFERENCE_TOKENS)
            with torch.set_grad_enabled(self.backward):
                outputs.append(experts(x[part], index[part], weights[part]))
            if self.backward:
                outputs[-1].backward(upstream[part].double())
        output = torch.cat(outputs).detach()
        if not self.backward:
            return [output]
        local = self.experts // self.ranks
        grads = []
        for parameter in experts.parameters():
            distributed.all_reduce(parameter.grad)
            grads.append(parameter.grad[rank * local : (rank + 1) * local].clone())
        return [output, x.grad, weights.grad, *grads]


def _strided_chunks(stock: Callable, tensors: tuple[torch.Tensor, ...], chunks: int) -> torch.Tensor:
    """Token i is in chunk i mod `chunks`; each chunk is dispatched, computed and checkpointed by itself."""
    tokens = len(tensors[0])
    outputs = [
        checkpoint(stock, *(tensor[chunk::chunks] for tensor in tensors), use_reentrant=False)
        for chunk in range(chunks)
    ]
    place = torch.empty(tokens, dtype=torch.int64)
    place[torch.cat([torch.arange(chunk, tokens, chunks) for chunk in range(chunks)])] = torch.arange(tokens)
    return torch.cat(outputs)[place]


def smallest_budget(waves: Callable[[int], int], wanted: int, resolution: int = 1024) -> int:
    """
    The smallest budget, to `resolution` bytes, that gives at most `wanted` waves.

    Arguments:
        waves: of a budget in bytes; raises `ValueError` where that is below one wave of a few rows.
        wanted: waves.
    """

    def enough(budget: int) -> bool:
        try:
            return waves(budget) <= wanted
        except ValueError:
            return False

    high = resolution
    while not enough(high):
        high *= 2
    low = high // 2
    while high - low > resolution:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def traffic(plan: ExchangePlan, sizes: PipelineSizes) -> dict[str, Any]:
    """
    What a plan does with the ranks, as plain numbers.

    `largest_receive` and `largest_send` are rows of a rank in a wave over the rows that the budget allows;
    `send_ratio` is the largest send to one destination over the sender's mean, in the worst wave of the worst rank.
    """
    each = list(itertools.product(range(plan.ranks), range(plan.num_waves)))
    sent = np.array([plan.send_splits(rank, wave) for rank, wave in each])
    received = np.array([plan.receive_splits(rank, wave) for rank, wave in each])
    busy = sent[sent.any(1)]
    return {
        "waves": plan.num_waves,
        "waves_lower_bound": plan.lower_bound,
        "row_budget": sizes.caps.rows,
        "tile_rows": sizes.tile,
        "largest_receive": float(received.sum(1).max() / sizes.caps.rows),
        "largest_send": float(sent.sum(1).max() / sizes.caps.rows),
        "send_ratio": float((busy.max(1) / busy.mean(1)).max()),
        "moves": len(plan.moves),
        "foreign_bytes": plan.foreign_peak(),
        "load": list(plan.load),
        "native_load": list(plan.native),
    }


def cases(quick: bool) -> list[Case]:
    """The cases; `quick`: the same at a fraction of the size, without limits but the bound."""
    return list(_quick() if quick else _full())


def _full() -> Iterator[Case]:
    shapes = [(8, 2, 1024), (64, 8, 256), (16, 4, 512)]
    models = [
        ExpertParallelSizes(ranks=2, tokens=4096, hidden=512, width=i, experts=e, top_k=k, routing="balanced")
        for e, k, i in shapes
    ]
    yield from _waves_cases(models, counts=(1, 4, 10), limits={"balanced": 0.95, "95% to rank 0": 0.65})
    yield from _chunks_cases(models, chunks=10)
    yield from _forward_cases(models, waves=4)
    for tokens in (128, 512):
        yield from _small_cases([replace(model, tokens=tokens) for model in models], steps=10)
    peak = replace(models[1], ranks=4, budget="48MiB")
    saved = {"profile balanced": 0.85, "profile 80%/16": 0.95, "profile 95%/1": 0.95}
    yield from _peak_cases(peak, saved)


def _quick() -> Iterator[Case]:
    model = ExpertParallelSizes(ranks=2, tokens=96, hidden=32, width=32, experts=8, top_k=2, routing="balanced")
    found = [
        *_waves_cases([model], counts=(1, 4), limits={"balanced": 0.95, "95% to rank 0": 0.65}),
        *_chunks_cases([model], chunks=4),
        *_forward_cases([model], waves=4),
        *_small_cases([replace(model, tokens=8)], steps=2),
        *_peak_cases(replace(model, ranks=4, tokens=256, budget="192KiB"), {}),
    ]
    for case in found:
        bound = {name: limit for name, limit in case.limits.items() if isinstance(limit, str)}
        yield replace(case, limits=bound, gate=False)


_BOUND = {"beside_peak_bytes": "bound_bytes"}


def _waves_cases(models: list[ExpertParallelSizes], counts: tuple[int, ...], limits: dict[str, float]) -> Iterator:
    for model, (routing, limit), waves in itertools.product(models, limits.items(), counts):
        sizes = replace(model, routing=routing, waves=waves)
        yield _case(sizes, limits={"wall_ratio": limit, **_BOUND}, gate=True)


def _chunks_cases(models: list[ExpertParallelSizes], chunks: int) -> Iterator[Case]:
    for model, routing in itertools.product(models, ("balanced", "95% to rank 0")):
        yield _case(replace(model, routing=routing, chunks=chunks))


def _forward_cases(models: list[ExpertParallelSizes], waves: int) -> Iterator[Case]:
    for model, routing in itertools.product(models, ("balanced", "95% to rank 0")):
        yield _case(replace(model, routing=routing, waves=waves, backward=False), limits=_BOUND)


def _small_cases(models: list[ExpertParallelSizes], steps: int) -> Iterator[Case]:
    for model in models:
        yield _case(replace(model, budget="256MiB"), limits={"wall_ratio": 1.0, **_BOUND}, steps=steps)


def _peak_cases(model: ExpertParallelSizes, saved: dict[str, float]) -> Iterator[Case]:
    hot = [h for h in (16, 4, 1) if h < model.experts]
    profiles = {16: ("30%/16", "80%/16"), 4: ("50%/4",), 1: ("95%/1",)}
    for name in ("balanced", *itertools.chain(*(profiles[h] for h in hot))):
        routing = f"profile {name}"
        limits = {"peak_saved": saved[routing]} if routing in saved else {}
        yield _case(replace(model, routing=routing), limits={**limits, **_BOUND}, gate=routing in saved, timed=False)


def _case(sizes: ExpertParallelSizes, **values: Any) -> Case:
    return Case(name=sizes.label(), sizes=sizes, ranks=sizes.ranks, **values)
