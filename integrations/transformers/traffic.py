"""What the expert-parallel layers of a model exchange in a step: waves, rows, imbalance, lent bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import distributed, nn

from hf_longmoe.integrations.transformers.expert_parallel import pipelined
from hf_longmoe.schedules.dispatch.exchange import ExchangePlan
from hf_longmoe.schedules.dispatch.routing import Routing
from hf_longmoe.sizes import format_bytes

__all__ = ["LayerTraffic", "Traffic", "as_json", "log_entries", "over_ranks", "summary"]


@dataclass(frozen=True)
class LayerTraffic:
    """
    One layer in one step; of several forwards, or several blocks of tokens, the largest of each.

    Arguments:
        waves: of a forward.
        row_budget: rows that a rank may send, and may receive, in a wave.
        largest_receive, largest_send: rows, of the worst rank and wave.
        imbalance: the largest load of a rank over the mean, as the router left it.
        imbalance_after: the same once experts are lent.
        lent: (expert, rank) pairs.
        lent_bytes: of weights that were sent to other ranks in forward, over all ranks.
    """

    waves: float
    row_budget: float
    largest_receive: float
    largest_send: float
    imbalance: float
    imbalance_after: float
    lent: float
    lent_bytes: float

    def merge(self, other: LayerTraffic) -> LayerTraffic:
        return LayerTraffic(*map(max, astuple(self), astuple(other)))


class Traffic:
    """
    Listens to every pipelined experts module of a model while it is open.

    Arguments:
        model: a model or a wrapper of one; without such a module nothing is found.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = {name: module for name, module in model.named_modules() if pipelined(module)}
        self.layers: dict[str, LayerTraffic] = {}

    def __enter__(self) -> Traffic:
        for name, module in self.modules.items():
            module.longmoe_on_routing = partial(self._note, name)
        return self

    def __exit__(self, *error: Any) -> None:
        for module in self.modules.values():
            vars(module).pop("longmoe_on_routing", None)

    def _note(self, name: str, routing: Routing) -> None:
        for routed in routing.blocks:
            found = _of_plan(routed.plan)
            self.layers[name] = self.layers[name].merge(found) if name in self.layers else found


def _of_plan(plan: ExchangePlan) -> LayerTraffic:
    mean = max(sum(plan.load) / plan.ranks, 1)
    return LayerTraffic(
        waves=plan.num_waves,
        row_budget=plan.caps.rows,
        largest_receive=plan.largest_receive,
        largest_send=plan.largest_send,
        imbalance=max(plan.native) / mean,
        imbalance_after=max(plan.load) / mean,
        lent=len(plan.moves),
        lent_bytes=len(plan.moves) * plan.caps.weight_bytes,
    )


def over_ranks(layers: dict[str, LayerTraffic], device: torch.device) -> dict[str, LayerTraffic]:
    """The largest of each number over all ranks (expert groups may differ). Every rank must come here."""
    if not layers or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return layers
    numbers = torch.tensor([astuple(layer) for layer in layers.values()], dtype=torch.float64, device=device)
    distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX)
    return {name: LayerTraffic(*row) for name, row in zip(layers, numbers.tolist(), strict=True)}


def log_entries(layers: dict[str, LayerTraffic]) -> dict[str, float]:
    """For the trackers: the worst layer of a step."""
    if not layers:
        return {}
    worst = _merged(layers.values())
    return {
        "experts/waves": worst.waves,
        "experts/largest_receive_rows": worst.largest_receive,
        "experts/largest_send_rows": worst.largest_send,
        "experts/imbalance": round(worst.imbalance, 3),
        "experts/imbalance_after_lending": round(worst.imbalance_after, 3),
        "experts/lent_MiB": round(sum(layer.lent_bytes for layer in layers.values()) / 2**20, 3),
    }


def as_json(layers: dict[str, LayerTraffic]) -> dict[str, dict[str, float]]:
    return {name: asdict(layer) for name, layer in layers.items()}


def summary(steps: Iterable[dict[str, LayerTraffic]]) -> str:
    """One line about a run: the worst layer and step of each number."""
    worst = _merged(layer for layers in steps for layer in layers.values())
    return (
        f"Expert parallelism: at most {worst.waves:.0f} waves of {worst.row_budget:.0f} rows; received at most"
        f" {worst.largest_receive:.0f}, sent {worst.largest_send:.0f}. Largest load over the mean"
        f" {worst.imbalance:.2f}, after lending {worst.imbalance_after:.2f} (at most {worst.lent:.0f} lent, "
        f"{format_bytes(worst.lent_bytes)} of weights a layer)."
    )


def _merged(layers: Iterable[LayerTraffic]) -> LayerTraffic:
    return reduce(LayerTraffic.merge, layers)
