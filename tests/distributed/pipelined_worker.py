"""torchrun script: cases of `PipelinedLLEP` on one experts module, in float64, against one process."""

import contextlib
import random

import torch
from pipelined_setup import meshes, part_of, pipelined, relative, routing, whole_experts
from ranks import main
from torch import distributed
from torch.utils.checkpoint import checkpoint

from benchmarks.every_family import Widened
from hf_longmoe import DispatchConfig
from hf_longmoe.integrations.transformers.expert_parallel import sizes_of
from hf_longmoe.schedules.replay import checkpoint_once

HIDDEN, EXPERTS = 16, 8


class Batch:
    """What one rank, or all of an expert group, feed in one step."""

    def __init__(self, x, index, w, g, frozen):
        self.x, self.w = (t.clone().requires_grad_(n not in frozen) for n, t in (("x", x), ("w", w)))
        self.index, self.g = index, g


def batches(case, ranks, generator):
    """One tuple a batch of the expert group."""
    tokens = case["tokens"]
    k = case.get("k", 3)
    for count in tokens:
        index = routing(case.get("route", "random"), count, k, EXPERTS, ranks, generator)
        x, g = (torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
        yield x, index, torch.rand(count, k, generator=generator, dtype=torch.float64), g


def layer_of(experts, case, replays):
    """The layer that is checkpointed: `after` saves the experts' output, so that a replay has to pass them."""

    def layer(x, index, w):
        y = experts(x, index, w).to(x.dtype)
        return torch.sin(y) if case.get("after") else y

    mode, _, bare = case.get("mode", "plain").partition(", ")
    if not replays or mode == "plain":
        return layer
    return lambda *args: checkpoint(
        layer if bare else checkpoint_once(layer), *args, use_reentrant=mode == "reentrant"
    )


def step(layer, steps, order):
    """Forwards "f" and backwards "b", in order; "B" keeps the graph. Gives the outputs."""
    outputs, left, waiting = [], list(steps), []
    for letter in order:
        if letter == "f":
            batch = left.pop(0)
            outputs.append(layer(batch.x, batch.index, batch.w))
            waiting.append((outputs[-1], batch.g))
        else:
            y, g = waiting[0] if letter == "B" else waiting.pop(0)
            if y.requires_grad:
                y.backward(g, retain_graph=letter == "B")
    return outputs


def budget_of(case, part, ranks):
    """Bytes; "least" is the smallest that is not refused, which is not above what a refusal asks for."""
    if case.get("budget", "1GiB") != "least":
        return case.get("budget", "1GiB")
    config = {name: case[name] for name in ("kernel", "overlap", "imbalance") if name in case}

    def fits(budget):
        try:
            sizes_of(part, ranks, DispatchConfig(budget=budget, **config))
        except ValueError as error:
            return int(str(error).rpartition(" ")[2].rstrip("."))

    asked = fits(1)
    low, high = 1, asked
    assert fits(high) is None, f"{asked} was asked for and is refused"
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return high


def errors(got, whole, part, first, frozen):
    """
    Largest relative error of each tensor. One that wants a gradient and has none is infinitely wrong, and so is one
    that wants none and has one.

    Arguments:
        got: (name, ours, the reference's), a name once a step.
        whole, part: experts after backward; `part` begins with expert `first`.
    """
    got = list(got)
    for name, param in part.named_parameters():
        full = whole.get_parameter(name)
        full = torch.zeros_like(full) if full.grad is None else full.grad
        if "." in name:  # shared by all experts
            got.append((name, param.grad, full))
            continue
        for i in range(part.num_experts):  # each expert against its own scale
            got.append((name, None if param.grad is None else param.grad[i], full[first + i]))
    found = dict.fromkeys((name for name, _, _ in got), 0.0)
    for name, a, b in got:
        if (a is None) != (name in frozen):
            found[name] = float("inf")
        elif a is not None:
            found[name] = max(found[name], relative(a, b))
    return found


def run(case):
    ep_mesh, tp_mesh = meshes(case.get("layout", "world"))
    rank, ranks, frozen = ep_mesh.get_local_rank(), ep_mesh.size(), case.get("frozen", ())
    order, shared = case.get("order", "fb"), tp_mesh.size()
    whole = whole_experts(case.get("family", "mixtral"), case.get("implementation", "eager"))
    part = part_of(whole, rank, ranks, frozen)
    config = {name: case[name] for name in ("kernel", "overlap", "imbalance") if name in case}
    budget, record = budget_of(case, part, ranks), []
    ours = pipelined(
        part, ep_mesh, tp_mesh, saved_after=bool(case.get("after")), record=record.append, budget=budget, **config
    )
    # Other seeds in other expert groups: their batches must not mix.
    generator = torch.Generator().manual_seed(case.get("seed", 1) + 1000 * (distributed.get_rank() // ranks))
    group = [list(batches(case, ranks, generator)) for _ in range(order.count("f"))]

    steps = [Batch(*parts[rank // shared], frozen) for parts in group]
    outputs = step(layer_of(ours, case, True), steps, order)
    together = [Batch(*map(torch.cat, zip(*parts, strict=True)), frozen) for parts in group]
    for param in whole.parameters():
        param.grad = None
    wanted = step(layer_of(whole, case, False), together, order)

    at = sum(case["tokens"][: rank // shared])
    mine = slice(at, at + case["tokens"][rank // shared])
    got = []
    for y, batch, want, all_of in zip(outputs, steps, wanted, together, strict=True):
        got.append(("y", y, want[mine]))
        for name, a, b in (("x", batch.x, all_of.x), ("w", batch.w, all_of.w)):
            full = torch.zeros_like(b) if b.grad is None else b.grad
            got.append((name, a.grad, full[mine]))
    plan = record[0].whole.plan
    return {
        "errors": errors(got, whole, part, rank * part.num_experts, frozen),
        "budget": budget,
        "routed": len(record),
        "waves": [r.whole.plan.num_waves for r in record],
        "moves": len(plan.moves),
    }


def seeds(case):
    """Many random cases, the same on every rank; the worst error, and how many had several waves and lent experts."""
    worst, several, lent = 0.0, 0, 0
    for seed in range(case["seeds"]):
        draw = random.Random(seed)
        result = run(
            dict(
                seed=seed,
                tokens=[draw.choice([0, 1, draw.randint(2, 12)]) for _ in range(distributed.get_world_size())],
                route=draw.choice(["random", "skew", "one", "absent", "dropped", "dirichlet"]),
                k=draw.randint(1, 4),
                budget=int(12_000 * 10 ** draw.random()),
                imbalance=draw.choice([1.0, 1.3, 100.0]),
                overlap=draw.randint(1, 3),
            )
        )
        worst = max(worst, *result["errors"].values())
        several += result["waves"][0] > 1
        lent += result["moves"] > 0
    return {"worst": worst, "several waves": several, "lent": lent}


def widened(case):
    """muse_spark's norm computes in float32 whatever its dtype."""
    with Widened() if case.get("family") == "muse_spark" else contextlib.nullcontext():
        return seeds(case) if "seeds" in case else run(case)


if __name__ == "__main__":
    main(widened)
