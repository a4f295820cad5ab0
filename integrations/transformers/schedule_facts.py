"""What the schedules of a patched model take at most, whatever the routing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_longmoe.config import LongMoEConfig
from hf_longmoe.integrations.transformers.experts import block_of, hidden_of
from hf_longmoe.planner.shape import ModelShape
from hf_longmoe.schedules.dispatch import LocalDispatch
from hf_longmoe.schedules.dispatch.sizes import pipeline_sizes
from hf_longmoe.schedules.vocab import tile_bytes

__all__ = ["ScheduleFacts", "facts_of", "like_input"]


@dataclass(frozen=True)
class ScheduleFacts:
    """
    What the schedules of a model take at most, whatever the routing.

    Arguments:
        budgets: of dispatch, on one rank and under expert parallelism, with what each leaves beside its budget.
        per_token: bytes that dispatch takes where all rows of a token are in flight.
        tiles: of vocab, its budget, and bytes of a token's logits.
        runs_again: whether experts run in a recompute too.
    """

    budgets: tuple[int, int]
    per_token: int
    tiles: tuple[int, int]
    runs_again: bool

    def dispatch(self, tokens: int, exchanged: bool = False) -> int:
        return min(self.budgets[exchanged], (2 if exchanged else 1) * tokens * self.per_token)

    def vocab(self, tokens: int) -> int:
        return min(self.tiles[0], tokens * self.tiles[1])


def facts_of(model: PreTrainedModel, caps: LongMoEConfig, shape: ModelShape, ranks: int) -> ScheduleFacts:
    local, exchanged, per_token, again = 0, 0, 0, False
    for module in model.modules():
        schedule = vars(module).get("longmoe_schedule")
        if schedule is None:
            continue
        again = again or schedule.output_saved_after
        weights = 4 * sum(p.numel() for p in module.parameters())
        if isinstance(schedule, LocalDispatch):
            hidden, (block, params) = hidden_of(module), block_of(module, module.longmoe_kernel)
            beside = block.beside_rows(params, schedule.budget)
            gradients = sum(4 * p[0].numel() for p in params if p.dim() == 3 and p.itemsize < 4)
            row = block.bytes_per_row(hidden, params) + 8 * hidden
            local = max(local, schedule.budget + gradients + beside)
            # As many rows as there are, in one wave: less than this, and than any budget.
            per_token = max(per_token, shape.top_k * row + 8 * hidden)
            if ranks > 1:
                sizes = (hidden, params[0].dtype, block, params, ranks)
                pipeline = pipeline_sizes(
                    caps.dispatch.budget, *sizes, depth=caps.dispatch.overlap, imbalance=caps.dispatch.imbalance
                )
                exchanged = max(exchanged, pipeline.bound)
        else:
            local, exchanged = (max(known, schedule.budget + weights) for known in (local, exchanged))
            per_token = max(per_token, schedule.bytes_per_token(module, like_input(module)) + weights)
    tiles = (0, 0)
    if caps.vocab is not None:
        head = model.get_output_embeddings().weight
        tiles = caps.vocab.budget, tile_bytes(1, *head.shape, dtype=head.dtype, keep_logits=shape.softcap)
    return ScheduleFacts((local, exchanged), per_token, tiles, again)


def like_input(module: nn.Module) -> torch.Tensor:
    weight = next(p for p in module.parameters() if p.dim() == 2)
    return torch.empty(0, weight.shape[1], dtype=weight.dtype, device="meta")
