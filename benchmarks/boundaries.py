"""
Checkpoint boundaries in host memory against boundaries on the device: the peak must not know the number of layers.

The device is a fake one, made of host memory: copies are late, at random, and what is in host memory is left out of
the peaks. So bytes and gradients mean something here, and times do not (`python -m benchmarks gpu` has those).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.case import Case, Growth, Problem
from hf_longmoe.peaks.region import tag
from hf_longmoe.schedules.boundaries import BoundaryOffload
from hf_longmoe.schedules.host import FakeEngine

__all__ = ["StackSizes", "cases"]


class _Device(FakeEngine):
    """Its host memory counts with what the peaks leave out."""

    def host_empty(self, nbytes: int) -> torch.Tensor:
        memory = super().host_empty(nbytes)
        tag("parameters", memory)
        return memory


@dataclass(frozen=True, kw_only=True)
class StackSizes:
    """
    Arguments:
        tokens, hidden, layers (`int`): N, H, L. Each layer is `x + tanh(x) * w`, checkpointed.
        depth (`int`, defaults to 1): of our schedule.
        budget (`int`, *optional*): of our schedule, in boundaries; None: all but the last go to the host.
        reentrant (`bool`, defaults to `False`): the mode of checkpointing.
    """

    tokens: int
    hidden: int
    layers: int
    depth: int = 1
    budget: int | None = None
    reentrant: bool = False

    @property
    def boundary(self) -> int:
        """Bytes of one."""
        return self.tokens * self.hidden * 4

    def label(self) -> str:
        budget = "" if self.budget is None else f", host budget of {self.budget}"
        return f"L {self.layers}, N {self.tokens}, H {self.hidden}, depth {self.depth}{budget}" + (
            ", reentrant" if self.reentrant else ""
        )

    def build(self) -> Problem:
        torch.manual_seed(0)
        x = torch.randn(self.tokens, self.hidden, requires_grad=True)
        weights = [torch.randn(self.hidden).mul_(0.1).requires_grad_() for _ in range(self.layers)]
        engine = _Device()
        limit = None if self.budget is None else self.budget * self.boundary
        offload = BoundaryOffload(engine, host_budget=limit, depth=self.depth)

        def run(call) -> torch.Tensor:
            # Not `x` itself, which is alive anyway: as an embedding, the first boundary is the model's own.
            hidden = x.clone()
            for weight in weights:
                hidden = call(_layer, hidden, weight, use_reentrant=self.reentrant)
            return hidden

        def ours() -> torch.Tensor:
            offload.begin(count=self.layers)
            return run(lambda *args, **kwargs: offload.checkpoint(checkpoint, *args, **kwargs))

        def details() -> dict:
            payload = offload.offloaded * self.boundary
            return {
                "bound_bytes": self.bound(),
                "offloaded": offload.offloaded,
                "left": offload.left,
                "boundary_bytes": self.boundary,
                "host_bytes": offload.host_bytes,
                "host_ratio": offload.host_bytes / payload if payload else 1.0,
                "sent_down_bytes": offload.sent["down"],
                "sent_up_bytes": offload.sent["up"],
            }

        def reference() -> list[torch.Tensor]:
            leaves = [tensor.detach().double().requires_grad_() for tensor in (x, *weights)]
            hidden = leaves[0]
            for weight in leaves[1:]:
                hidden = _layer(hidden, weight)
            hidden.backward(upstream.double())
            return [hidden.detach(), *(leaf.grad for leaf in leaves)]

        upstream = torch.randn(self.tokens, self.hidden)
        return Problem([x, *weights], upstream, lambda: run(checkpoint), ours, reference, details=details)

    def bound(self) -> int:
        """Bytes of the boundaries that are on the device at most, and of a layer's own tensors: 5 of that size."""
        left = 1 if self.budget is None else max(self.layers - self.budget, 1)
        return (left + self.depth + 5) * self.boundary


def _layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x) * weight


def cases(quick: bool) -> list[Case]:
    """The cases; `quick`: the same at a fraction of the size, without gates."""
    stock = StackSizes(tokens=1024, hidden=256, layers=96)
    if quick:
        stock = StackSizes(tokens=64, hidden=32, layers=40)
    deeper = replace(stock, layers=2 * stock.layers)
    growth = Growth(
        case=stock.label(), unit="layer", units=stock.layers, bytes_per_unit=stock.boundary // 500, slack=0.02
    )
    limits = {"beside_peak_bytes": "bound_bytes", "error": "baseline_error", "host_ratio": 1.02}
    found = [
        Case(name=stock.label(), sizes=stock, limits={**limits, "peak_saved": 0.9}),
        Case(name=deeper.label(), sizes=deeper, limits=limits, grows_from=growth),
        *(
            Case(name=sizes.label(), sizes=sizes, limits=limits)
            for sizes in (
                replace(stock, reentrant=True),
                replace(stock, depth=2),
                replace(stock, budget=stock.layers // 2),
            )
        ),
    ]
    return [replace(case, gate=not quick, timed=False) for case in found]
