"""
Everything here that one accelerator can show, in under 8 minutes.

    python -m benchmarks gpu --json gpu.json

At the paper's widths (H 7,168, V 200,000): a layer's experts against `grouped_mm`, and the head and its loss against
the whole logits and torch's own operator. SCO on Mixtral layers against plain checkpointing and `offload=True`. The
streaming optimizer, each `update_on`, against a serial step on the host. Sizes shrink where the device or the host has
too little memory; the case's name says so. `--quick` shows that it runs, on the CPU where there is no accelerator.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.case import Case
from benchmarks.gpu_blocks import DeviceExpertsSizes, DeviceHeadSizes
from benchmarks.gpu_boundaries import LayersSizes
from benchmarks.gpu_measure import DeviceSizes, measure, run_device
from benchmarks.gpu_optimizer import StreamSizes
from hf_longmoe.schedules.host import host_memory_available

__all__ = ["cases", "fit", "measure", "refusal", "where"]

_FILLED = 0.85  # of the memory that is free: what is needed is an estimate


def refusal(quick: bool) -> str | None:
    """Why it cannot run here; None where it can."""
    if quick or run_device().type != "cpu":
        return None
    return "needs an accelerator with memory of its own; --quick shows on the CPU that the command runs"


def where() -> dict[str, Any]:
    """More about the environment."""
    device = run_device()
    if device.type == "cpu":
        return {"device": "cpu"}
    module = torch.get_device_module(device)
    return {
        "device": f"{device.type}: {module.get_device_name(device)}",
        "device_memory_bytes": module.mem_get_info(device)[1],
    }


def fit(sizes: DeviceSizes, device_bytes: float, host_bytes: float) -> DeviceSizes | None:
    """The sizes, or the first smaller ones, that need no more; None: there are none."""
    while sizes is not None:
        on_device, on_host = sizes.needs()
        if on_device <= device_bytes and on_host <= host_bytes:
            return sizes
        sizes = sizes.smaller()
    return None


def cases(quick: bool) -> list[Case]:
    """The cases, in sizes that fit; `quick`: tiny ones, without limits. Limits are those of issue and paper."""
    device = run_device()
    on_device, on_host = float("inf"), _FILLED * host_memory_available()
    if device.type != "cpu":
        on_device = _FILLED * torch.get_device_module(device).mem_get_info(device)[0]
    found = []
    for sizes, limits in _all(quick):
        fitting = fit(sizes, on_device, on_host)
        if fitting is None:
            print(f"{sizes.label()}: left out, no size of it fits the memory here", file=sys.stderr)
            continue
        name = fitting.label() if fitting == sizes else f"{fitting.label()}, shrunk to fit"
        found.append(Case(name=name, sizes=fitting, limits={} if quick else limits, gate=bool(limits) and not quick))
    return found


def _all(quick: bool) -> list[tuple[DeviceSizes, dict[str, float | str]]]:
    experts = DeviceExpertsSizes(
        model="qwen3_moe", tokens=16384, hidden=7168, width=2048, experts=64, top_k=8, budget="256MiB"
    )
    head = DeviceHeadSizes(tokens=16384, hidden=7168, vocab=200_000, budget="256MiB", dtype=torch.bfloat16)
    layers = LayersSizes(tokens=32768, hidden=2048, width=2048, experts=8, top_k=2, layers=24, heads=16, offload=False)
    stream = StreamSizes(tokens=3 * 2**28, tensors=12, bucket="64MiB", update_on="accelerator")
    if quick:
        experts = replace(experts, tokens=64, hidden=64, width=32, experts=16, budget="256KiB")
        head = replace(head, tokens=64, hidden=64, vocab=1000, budget="128KiB")
        layers = replace(layers, tokens=64, hidden=64, width=32, layers=6, heads=4)
        stream = replace(stream, tokens=12 * 2**13, bucket="64KiB")
    wider = replace(experts, budget="1MiB" if quick else "1GiB")
    heads = [replace(head, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    if hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions"):
        heads += [replace(one, torch_op=True) for one in heads]
    exact = {"differing_elements": "baseline_differing_elements", "host_ratio": 1.02}
    apart = {"boundaries_peak_bytes": "boundaries_bound_bytes"}
    staged = {"requested_bytes": "staging_bound_bytes", "masters_difference": 1e-6}
    return [
        *((sizes, {}) for sizes in (experts, wider, *heads)),
        (layers, {**exact, **apart, "wall_ratio": 1.01}),
        (replace(layers, offload=True), {**exact, **apart, "wall_ratio": 1.0}),
        (stream, staged),
        (replace(stream, update_on="cpu"), {**staged, "differing_elements": 0}),
        (replace(stream, update_on="both"), staged),
        (replace(stream, update_on="auto"), {**staged, "best_wall_ratio": 1 / 2.05}),
    ]
