"""Script for `launch`: the bytes that `PipelinedLLEP` holds, and its errors in half precision beside stock's."""

import torch
from pipelined_setup import meshes, part_of, pipelined, routing, whole_experts
from ranks import main
from torch import distributed
from torch.utils.checkpoint import checkpoint
from transformers.distributed.expert_parallel import AllToAllEP

from hf_longmoe import DispatchConfig
from hf_longmoe.integrations.transformers.expert_parallel import sizes_of
from hf_longmoe.peaks import StorageProbe
from hf_longmoe.schedules.replay import checkpoint_once

EXPERTS, SLOTS = 8, 2


def batch(case, hidden, seed):
    """float64, of values that the case's dtype holds: tokens, expert ids, routing weights, the output's gradient."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    generator = torch.Generator().manual_seed(100 * seed + rank)
    dtype = getattr(torch, case["dtype"])
    tokens = case["tokens"]
    x, g = (torch.randn(tokens, hidden, generator=generator).to(dtype).double() for _ in range(2))
    index = routing(case["route"], tokens, SLOTS, EXPERTS, ranks, generator)
    return x, index, torch.rand(tokens, SLOTS, generator=generator).double(), g


def bytes_held(case):
    """Peaks beside the input, the output, the parameters and all gradients, in the two halves of a step."""
    rank, ranks, record = distributed.get_rank(), distributed.get_world_size(), []
    dtype = getattr(torch, case["dtype"])
    whole = whole_experts(implementation="grouped_mm", hidden=32, width=48, dtype=dtype)
    part = part_of(whole, rank, ranks)
    config = {name: case[name] for name in ("budget", "kernel", "imbalance", "overlap")}
    layer = pipelined(part, *meshes("world"), saved_after=False, record=record.append, **config)
    x, index, w, g = batch(case, 32, 0)
    x, w, g = x.to(dtype).requires_grad_(), w.float().requires_grad_(), g.to(dtype)
    with StorageProbe() as probe:
        y = checkpoint(checkpoint_once(layer), x, index, w, use_reentrant=False)
        forward = probe.report().total - y.nbytes
        probe.restart()
        y.backward(g)
        gradients = [x.grad, *(param.grad for param in part.parameters())]
        backward = probe.report().total - y.nbytes - sum(t.nbytes for t in gradients)
    plan, sizes = record[0].whole.plan, sizes_of(part, ranks, DispatchConfig(**config))
    return {
        "forward": forward,
        "backward": backward,
        "bound": sizes.bound,
        "rows": index.numel(),
        "waves": plan.num_waves,
        "moves": len(plan.moves),
        "blocks": len(record[0].blocks),
    }


def squares(got, want):
    """Of all ranks: squares of the errors, and of the values. `inf` where an error is not a number."""
    sums = [torch.stack([(a.double() - b).square().sum(), b.square().sum()]) for a, b in zip(got, want, strict=True)]
    sums = torch.stack(sums).nan_to_num(nan=float("inf"))
    distributed.all_reduce(sums)
    return sums[:, 0] / sums[:, 1]


def half(case):
    """Root mean square errors of output, x, w and each parameter over seeds: ours, and the stock all-to-all's."""
    rank, ranks, record = distributed.get_rank(), distributed.get_world_size(), []
    held, dtype = (getattr(torch, case.get(name, case["dtype"])) for name in ("experts", "dtype"))
    ours, stock = 0, 0
    for seed in range(5):
        whole = whole_experts(implementation="grouped_mm", hidden=32, width=48, dtype=held)
        x, index, w, g = batch(case, 32, seed)

        def step(layer, part, x_dtype, w_dtype, batch=(x, index, w, g)):
            x, index, w, g = batch
            x, w = (t.to(kind, copy=True).requires_grad_() for t, kind in ((x, x_dtype), (w, w_dtype)))
            y = layer(x, index, w).to(x_dtype)
            y.backward(g.to(x_dtype))
            return y.detach(), x.grad, w.grad, *(param.grad for param in part.parameters())

        exact = part_of(whole_experts(hidden=32, width=48, dtype=held).double(), rank, ranks)
        want = step(AllToAllEP(exact, *meshes("world")), exact, torch.float64, torch.float64)
        part = part_of(whole, rank, ranks)
        layer = pipelined(
            part, *meshes("world"), record=record.append, **{name: case[name] for name in ("budget", "kernel")}
        )
        ours = ours + squares(step(layer, part, dtype, torch.float32), want)
        if held == dtype:
            part = part_of(whole, rank, ranks)
            stock = stock + squares(step(AllToAllEP(part, *meshes("world")), part, dtype, torch.float32), want)
    return {
        "ours": (ours / 5).sqrt().tolist(),
        "stock": (stock / 5).sqrt().tolist() if held == dtype else None,
        "blocks": max(len(routing.blocks) for routing in record),
        "waves": min(routing.whole.plan.num_waves for routing in record),
    }


KINDS = {"bytes": bytes_held, "half": half}


if __name__ == "__main__":
    main(lambda case: KINDS[case["kind"]](case))
