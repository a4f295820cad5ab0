"""Counts of a config's model, stock or with small caps (see `planner.counts`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from hf_longmoe.config import DispatchConfig, LongMoEConfig, VocabConfig
from hf_longmoe.integrations.transformers.experts import block_of, hidden_of
from hf_longmoe.integrations.transformers.fake_step import fake_model, fake_moments, without_data
from hf_longmoe.integrations.transformers.planning_shape import depths_of
from hf_longmoe.integrations.transformers.schedule_facts import like_input
from hf_longmoe.planner.counts import Counts
from hf_longmoe.planner.depth import Moments
from hf_longmoe.planner.shape import Layout
from hf_longmoe.schedules.dispatch import LocalDispatch, TokenTiles
from hf_longmoe.schedules.vocab import tile_bytes

__all__ = ["Lengths", "count", "lengths_for", "small_caps"]

_SHORTEST = 1024
_BENT = 0.01  # of a moment's bytes
_ROWS, _FEWEST = 256, 8  # of a wave, or tokens of a tile, in a count


@dataclass(frozen=True)
class Lengths:
    """
    Tokens of a count's sequences, ascending.

    Arguments:
        stock: of the stock model.
        kept: of the patched one: several waves and tiles, so that the schedules' part does not grow from there.
        bent: after these, where something grows with the square of the length.
    """

    stock: tuple[int, ...]
    kept: tuple[int, ...]
    bent: tuple[int, ...]

    def patched(self, layout: Layout, bent: bool) -> tuple[int, ...]:
        """Of the patched model: first the layout's own length, where it is shorter."""
        own = max(_SHORTEST, layout.tokens)
        return ((own,) if own < self.kept[0] else ()) + self.kept + (self.bent if bent else ())


_USUAL = Lengths((1024, 4096, 16384, 32768), (4096, 8192), (16384, 32768))
# Of a model that walks along the sequence in Python: what takes seconds for others takes it a quarter of an hour.
_SHORT = Lengths((512, 1024, 2048, 4096), (2048, 4096), (6144, 8192))
_WALK, _WALKS = (256, 1024), 0.2  # the share of more operations, of four times the tokens


def lengths_for(config: PreTrainedConfig, layout: Layout) -> Lengths:
    """Short ones, if the forward of a longer sequence has more operations: a scan or chunks without a kernel."""
    operations = []
    with without_data(config, layout), torch.no_grad():
        model = fake_model(config, layout, depth=depths_of(config)[0], patched=None)
        for length in _WALK:
            with _Operations() as seen:
                model(input_ids=torch.zeros(1, length, dtype=torch.int64))
            operations.append(seen.count)
    few, many = operations
    return _SHORT if many > (1 + _WALKS) * few else _USUAL


class _Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def count(
    config: PreTrainedConfig,
    layout: Layout,
    patched: LongMoEConfig | None = None,
    *,
    lengths: Lengths = _USUAL,
    bent: bool = False,
    depths: tuple[int, ...] | None = None,
) -> Counts:
    """
    Runs fake steps of one sequence at a few lengths and one or two small depths.

    Arguments:
        config: of a causal LM.
        layout: of it count `ep_size`, `checkpointing`, `dtype` and `optimizer`.
        patched: caps; the stock model if not given.
        lengths: see `lengths_for`.
        bent: whether something grows with the square of the length.
        depths: found if not given.

    Raises:
        `ValueError`: as `fake_step`.
    """
    ran, layers = depths or depths_of(config), config.get_text_config().num_hidden_layers
    tokens = lengths.stock if patched is None else lengths.patched(layout, bent)
    one = dataclasses.replace(layout, seq_len=tokens[-1], micro_batch=1, cp_size=1)
    moments = [fake_moments(config, one, tokens, depth=depth, patched=patched) for depth in ran]
    if depths is None and len(ran) == 2 and (third := 2 * ran[1] - ran[0]) <= layers:
        (deeper,) = fake_moments(config, one, tokens[:1], depth=third, patched=patched)
        if _bends(moments[0][0], moments[1][0], deeper):
            ran = (ran[1], third)
            moments = [moments[1], fake_moments(config, one, tokens, depth=third, patched=patched)]
    return Counts(layers, ran, tokens, moments)


def _bends(first: Moments, second: Moments, third: Moments) -> bool:
    """
    Whether three depths, equally far apart, are not on a line: what several layers in a row leave alive together is
    not there in the shortest.
    """
    return any(
        abs(high - (2 * second[key].highs.get(name, 0) - first[key].highs.get(name, 0)))
        > _BENT * sum(moment.highs.values())
        for key, moment in third.items()
        if key in first and key in second
        for name, high in moment.highs.items()
    )


def small_caps(config: PreTrainedConfig, layout: Layout, lengths: Lengths) -> LongMoEConfig:
    """Caps of which a step of the shortest count takes several waves and tiles."""
    with without_data(config, layout):
        model = fake_model(config, layout, depth=depths_of(config)[0], patched=_roomy())
        per_row = 0
        for module in model.modules():
            schedule = vars(module).get("longmoe_schedule")
            if isinstance(schedule, LocalDispatch):
                block, params = block_of(module, module.longmoe_kernel)
                per_row = max(per_row, 2 * block.bytes_per_row(hidden_of(module), params))
            elif isinstance(schedule, TokenTiles):
                per_row = max(per_row, schedule.bytes_per_token(module, like_input(module)))
        head = model.get_output_embeddings().weight
        vocab = tile_bytes(_ROWS, *head.shape, dtype=head.dtype, keep_logits=True, bias=True)
    # Half of the budget sums outputs in float32: of half the tokens of the shortest count, at most.
    dispatch = min(_ROWS * per_row, 4 * head.shape[1] * lengths.patched(layout, bent=False)[0])
    return _caps(max(dispatch, _FEWEST * per_row, 1), vocab)


def _roomy() -> LongMoEConfig:
    return _caps(2**60, 2**60)


def _caps(dispatch: int, vocab: int) -> LongMoEConfig:
    return LongMoEConfig(
        dispatch=DispatchConfig(budget=dispatch),
        vocab=VocabConfig(budget=vocab, schedule="tiles"),
        boundaries=None,
        optimizer=None,
    )
