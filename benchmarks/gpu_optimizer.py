"""The optimizer of `python -m benchmarks gpu`: the streaming step against one on the host, stage after stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_measure import DeviceProblem, engine_of, wait
from hf_longmoe.schedules.optimizer import OffloadStreamAdamW
from hf_longmoe.schedules.optimizer.update import host_threads
from hf_longmoe.sizes import parse_bytes

__all__ = ["StreamSizes"]

_OPTIONS = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
_COMPARED = 2**20  # elements of the first parameter, in float64


@dataclass(frozen=True, kw_only=True)
class StreamSizes:
    """
    bfloat16 parameters and gradients.

    Arguments:
        tokens (`int`): elements, of all parameters.
        tensors (`int`): in how many parameters.
        bucket (`str`): of our schedule.
        update_on (`str`): of our schedule.
        slots (`int`, defaults to 2): of our schedule.
    """

    tokens: int
    tensors: int
    bucket: str
    update_on: str
    slots: int = 2

    def label(self) -> str:
        return (
            f"optimizer: update_on={self.update_on}, {self.tokens} elements in {self.tensors} tensors, "
            f"{self.slots} x {self.bucket}, against a serial step on the host"
        )

    def needs(self) -> tuple[int, int]:
        # Two sets of parameters, one of gradients. Masters and moments twice; gradients in both dtypes, parameters.
        return self.tokens * 6 + self.slots * parse_bytes(self.bucket) + 2**30, self.tokens * (24 + 8) + 2**30

    def smaller(self) -> StreamSizes | None:
        return replace(self, tokens=self.tokens // 2) if self.tokens >= 2**25 else None

    def build(self) -> DeviceProblem:
        torch.manual_seed(0)
        device, length = torch.get_default_device(), self.tokens // self.tensors
        starts = [torch.randn(length).to(torch.bfloat16) for _ in range(self.tensors)]
        grads = [torch.randn(length).to(torch.bfloat16) for _ in range(self.tensors)]
        params, others = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
        for param, other, grad in zip(params, others, grads, strict=True):
            param.grad = other.grad = grad
        start = starts[0][:_COMPARED].double()
        del starts
        with torch.device("cpu"):  # what is on the host
            serial = _Serial(others, device)
            streaming = OffloadStreamAdamW(
                params,
                bucket=self.bucket,
                slots=self.slots,
                update_on=self.update_on,
                engine=engine_of(device),
                **_OPTIONS,
            )
        steps = {"baseline": 0, "ours": 0}

        def baseline() -> torch.Tensor:
            steps["baseline"] += 1
            serial.step()
            return others[0]

        def ours() -> torch.Tensor:
            steps["ours"] += 1
            streaming.step()
            streaming.synchronize()
            return params[0]

        def master(side: str) -> torch.Tensor:
            found = serial.masters[0] if side == "baseline" else streaming.state[params[0]]["master"].flatten()
            return found.detach()[:_COMPARED].to(device)

        def reference() -> list[torch.Tensor]:
            exact = nn.Parameter(start.clone())
            exact.grad = grads[0][:_COMPARED].double()
            plain = torch.optim.AdamW([exact], foreach=False, **_OPTIONS)
            for _ in range(steps["ours"]):
                plain.step()
            return [exact.detach()]

        def details() -> dict[str, Any]:
            timings = streaming.timings
            pairs = [
                (own.detach(), streaming.state[param]["master"].flatten())
                for own, param in zip(serial.masters, params, strict=True)
            ]
            return {
                "steps": steps["ours"],
                "differing_elements": sum(int((own != found).sum()) for own, found in pairs),
                "masters_difference": max(float((own - found).abs().max() / own.abs().max()) for own, found in pairs),
                "staging_bound_bytes": self.slots * parse_bytes(self.bucket),
                "stage_seconds": timings.seconds,
                "stage_bytes": timings.nbytes,
                "stage_elements": timings.elements,
                "bound": timings.bound,
                "bound_seconds": timings.shortest,
                "accelerator_share": streaming.param_groups[0]["accelerator_share"],
            }

        return DeviceProblem(
            [*params, *others, *grads],
            torch.ones(()),
            baseline,
            ours,
            reference,
            backward=False,
            rivals=True,
            details=details,
            compared=lambda side, output: [master(side)],
            against=f"AdamW in float64, of the first {len(start)} elements' masters",
            close=serial.close,
        )


class _Serial:
    """Gradients down, the host's fused AdamW on float32 masters, parameters up; each when the one before has ended."""

    def __init__(self, params: list[nn.Parameter], device: torch.device) -> None:
        self._params, self._device, self._engine = params, device, engine_of(device)
        self.masters = [nn.Parameter(param.detach().to("cpu", torch.float32, copy=True)) for param in params]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self._slabs: list[torch.Tensor] = []
        self._grads, self._values = self._room(), self._room()
        self._optimizer = torch.optim.AdamW(self.masters, fused=True, **_OPTIONS)

    def _room(self) -> list[torch.Tensor]:
        """Pinned memory, in the parameters' dtype, for each of them."""
        slabs = [self._engine.host_empty(param.nbytes) for param in self._params]
        self._slabs += slabs
        return [slab.view(param.dtype) for slab, param in zip(slabs, self._params, strict=True)]

    @torch.no_grad()
    def step(self) -> None:
        with host_threads(False):  # as many as the streaming one takes
            for grad, param in zip(self._grads, self._params, strict=True):
                grad.copy_(param.grad)
            wait(self._device)
            torch._foreach_copy_([master.grad for master in self.masters], self._grads)
            self._optimizer.step()
            torch._foreach_copy_(self._values, self.masters)
            for param, value in zip(self._params, self._values, strict=True):
                param.copy_(value)
            wait(self._device)

    def close(self) -> None:
        wait(self._device)
        while self._slabs:
            self._engine.host_free(self._slabs.pop())
