"""
The optimizer's step: fused AdamW on buckets against torch's AdamW and the memory's bandwidth, and the pipeline on a
simulated link.

On this machine: the update of float32 buckets, as the host does it, against `torch.optim.AdamW` (`foreach=True`, and
one tensor after the other), and against the limit of 28 bytes an element: in-place scaling of parameter and moments
and a sum of the gradient, which read and write the same arrays as often and compute next to nothing. (What that
baseline leaves is no update, so that its error is the update's size.)

On a link of a given speed (`benchmarks/link.py`): bfloat16 parameters; copies and the host's update take a set time an
element, so that the numbers are the pipeline's, not this machine's. The host alone (`cpu`) against the same stages one
after the other, with at most 1 / 0.9 of its largest stage; `both` against the better of the two single ways where they
are equally fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.case import Case, Problem
from benchmarks.link import LinkEngine, paced
from hf_longmoe.schedules.optimizer import OffloadStreamAdamW
from hf_longmoe.schedules.optimizer.arena import flat, lay_out
from hf_longmoe.schedules.optimizer.lanes import HostLane
from hf_longmoe.schedules.optimizer.plan import ONE_WAY, capacity, cut
from hf_longmoe.schedules.optimizer.update import in_arena, update
from hf_longmoe.sizes import parse_bytes

__all__ = ["LinkSizes", "UpdateSizes", "cases"]

_OPTIONS = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
_NUMBERS = (1e-3, 0.9, 0.999, 1e-8, 1e-2)


def _parameters(elements: int, tensors: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """As many of the same length, with gradients."""
    torch.manual_seed(0)
    made = []
    for _ in range(tensors):
        made.append(torch.nn.Parameter(torch.randn(elements // tensors).to(dtype)))
        made[-1].grad = torch.randn(elements // tensors).to(dtype)
    return made


def _in_float64(start: torch.Tensor, grad: torch.Tensor, steps: int) -> list[torch.Tensor]:
    param = torch.nn.Parameter(start.double())
    param.grad = grad.double()
    optimizer = torch.optim.AdamW([param], foreach=False, **_OPTIONS)
    for _ in range(steps):
        optimizer.step()
    return [param.detach()]


@dataclass(frozen=True, kw_only=True)
class UpdateSizes:
    """
    Arguments:
        tokens (`int`): elements, of all parameters.
        tensors (`int`): in how many parameters.
        bucket (`str`): of our schedule.
        against (`str`): `"foreach"`, `"for-loop"` or `"bandwidth"`.
    """

    tokens: int
    tensors: int
    bucket: str
    against: str

    def label(self) -> str:
        baseline = "the bandwidth limit" if self.against == "bandwidth" else f"AdamW, {self.against}"
        return f"update of {self.tokens} elements in {self.tensors} tensors, {self.bucket}, against {baseline}"

    def build(self) -> Problem:
        params = _parameters(self.tokens, self.tensors, torch.float32)
        first = params[0]
        given = [*params, *(param.grad for param in params)]
        start, steps = first.detach().clone(), 0
        plain = torch.optim.AdamW(params, foreach=self.against == "foreach", **_OPTIONS)
        entries, (arena,) = lay_out([(param, "") for param in params], lambda device: True, 0)
        arena.allocate(lambda numel, _: torch.empty(numel))
        given += arena.flats.values()
        buckets = cut(entries, capacity(parse_bytes(self.bucket), ONE_WAY))
        scalar = torch.empty(())
        for entry in entries:
            entry.value, entry.grad = flat(entry.param.detach()), flat(entry.param.grad)

        def baseline() -> torch.Tensor:
            if self.against != "bandwidth":
                plain.step()
            else:
                for memory in (*params, *arena.flats.values()):
                    memory.mul_(1.0)
                for param in params:
                    param.grad.sum()
            return first.detach()

        def ours() -> torch.Tensor:
            nonlocal steps
            steps += 1
            for entry in entries:
                entry.launch = (*_NUMBERS, float(steps))
            for bucket in buckets:
                state = {kind: in_arena(arena.flats[kind], bucket.pieces) for kind in arena.kinds}
                update(bucket, state, None, scalar)()
            return first.detach()

        return Problem(
            given,
            torch.ones(()),
            baseline,
            ours,
            lambda: _in_float64(start, first.grad, 1),
            backward=False,
            details=lambda: {"bytes_per_element": 28, "buckets": len(buckets)},
        )


@dataclass(frozen=True, kw_only=True)
class LinkSizes:
    """
    Arguments:
        tokens (`int`): elements, of all parameters.
        tensors (`int`): in how many parameters.
        bucket (`str`): of our schedule.
        update_on (`str`): `"cpu"`, against the same stages one after the other; `"both"`, against the better of the
            two single ways.
        link (`float`): bytes a second of each direction.
        host (`float`): elements a second that the host updates.
    """

    tokens: int
    tensors: int
    bucket: str
    update_on: str
    link: float
    host: float

    def label(self) -> str:
        baseline = "its stages in turn" if self.update_on == "cpu" else "the better single way"
        return (
            f"{self.update_on}, {self.tokens} elements in {self.tensors} tensors, {self.bucket}, link "
            f"{self.link / 1e9:g} GB/s, host {self.host / 1e6:g} M elements/s, against {baseline}"
        )

    def build(self) -> Problem:
        made: dict[str, tuple[Callable[[], torch.Tensor], OffloadStreamAdamW, torch.Tensor]] = {}
        for way in ("cpu", "accelerator", "both") if self.update_on == "both" else ("cpu", "turns"):
            made[way] = self._optimizer(way)
        step, optimizer, first = made[self.update_on]
        others = [way for way in made if way != self.update_on]
        better = min(others, key=lambda way: self._seconds(made[way][0])) if len(others) > 1 else others[0]

        def details() -> dict[str, Any]:
            timings = optimizer.timings
            return {
                "bound": timings.bound,
                "bound_seconds": timings.shortest / 0.9,
                "stage_seconds": timings.seconds,
                "accelerator_share": optimizer.param_groups[0]["accelerator_share"],
                "better_single": better,
            }

        start = _parameters(self.tokens, self.tensors, torch.bfloat16)[0]
        return Problem(
            [param for _, other, _ in made.values() for param in other.param_groups[0]["params"]],
            torch.ones(()),
            made[better][0],
            step,
            lambda: _in_float64(start.detach(), start.grad, 2),
            backward=False,
            details=details,
        )

    @staticmethod
    def _seconds(step: Callable[[], torch.Tensor]) -> float:
        begun = time.perf_counter()
        step()
        return time.perf_counter() - begun

    def _optimizer(self, way: str) -> tuple[Callable[[], torch.Tensor], OffloadStreamAdamW, torch.Tensor]:
        """Its step, which waits for the end, after the first one, in which memory is taken and shares are found."""
        engine, params = LinkEngine(self.link), _parameters(self.tokens, self.tensors, torch.bfloat16)
        slots, update_on = (1, "cpu") if way == "turns" else (2, way)
        optimizer = OffloadStreamAdamW(
            params, bucket=self.bucket, slots=slots, update_on=update_on, engine=engine, **_OPTIONS
        )

        def step() -> torch.Tensor:
            with paced(HostLane, "_update", lambda block, *_: block.numel / self.host):
                optimizer.step()
            engine.idle()
            # A real device counts a parameter's versions up when a write is launched, this one when it is done.
            for entry in optimizer._book.entries.values():
                entry.seen = entry.version()
            return params[0].detach()

        step()
        return step, optimizer, params[0]


def cases(quick: bool) -> list[Case]:
    """The cases; `quick`: the same at a fraction of the size, without limits."""
    elements = 2**19 if quick else 2**24
    whole = UpdateSizes(tokens=elements, tensors=4, bucket="1MiB" if quick else "64MiB", against="foreach")
    many = replace(whole, tensors=256)
    # Equally fast: 12 bytes an element up and down on the link take as long as the host takes for it.
    link = LinkSizes(
        tokens=elements // 4,
        tensors=4,
        bucket="128KiB" if quick else "2MiB",
        update_on="both",
        link=0.1e9,
        host=0.1e9 / 12,
    )
    # 16 ms a stage and bucket: long beside the time in which this machine wakes a thread.
    alone = replace(link, bucket="64KiB" if quick else "1MiB", update_on="cpu", link=0.008e9, host=0.004e9)
    found = [
        Case(name=whole.label(), sizes=whole, limits={"cpu_ratio": 0.5}, gate=True),
        *(
            Case(name=sizes.label(), sizes=sizes, limits=limits, gate=True)
            for sizes, limits in (
                (replace(whole, against="for-loop"), {"cpu_ratio": 0.5}),
                (replace(whole, against="bandwidth"), {"wall_ratio": 1 / 0.85}),
                (many, {"cpu_ratio": 0.5}),
            )
        ),
        Case(name=alone.label(), sizes=alone, limits={"wall_seconds": "bound_seconds"}, gate=True),
        Case(name=link.label(), sizes=link, limits={"wall_ratio": 1 / 1.25}, gate=True),
    ]
    return [replace(case, limits={}, gate=False) for case in found] if quick else found
