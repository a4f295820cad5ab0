"""Counts of a config's model (see `planner.counts`), and what its schedules take alone, at any size and any cap."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_longmoe.config import DispatchConfig, LongMoEConfig, VocabConfig
from hf_longmoe.integrations.transformers.experts import block_of, is_experts
from hf_longmoe.integrations.transformers.fake_step import fake_model, fake_moments, without_data
from hf_longmoe.integrations.transformers.planning_shape import depths_of
from hf_longmoe.integrations.transformers.regions import TOKENWISE
from hf_longmoe.peaks import StorageProbe, component
from hf_longmoe.planner.counts import Counts
from hf_longmoe.planner.shape import Layout, ModelShape
from hf_longmoe.schedules.dispatch import LocalDispatch, TokenTiles
from hf_longmoe.schedules.dispatch.sizes import pipeline_sizes
from hf_longmoe.schedules.rehearsal import Rehearsal, rehearsal
from hf_longmoe.schedules.vocab import LogitTransform, linear_cross_entropy, tile_bytes

__all__ = ["LENGTHS", "SchedulesAlone", "count", "small_caps"]

LENGTHS = (1024, 4096, 16384, 131072)
_KEPT = (4096, 32768)  # patched: the schedules' part does not grow
# By what is at work, then by phase.
Alone = dict[str, dict[str, int]]

_PHASES = ("forward", "backward")
_MOE = ("dispatch", f"dispatch, {TOKENWISE}")
_ROWS = 256  # of a wave, or tokens of a tile, in a count


def count(
    config: PreTrainedConfig, layout: Layout, patched: LongMoEConfig | None = None, *, bent: bool = False
) -> Counts:
    """
    Runs fake steps of one sequence at a few lengths and one or two small depths.

    Arguments:
        config: of a causal LM.
        layout: of it count `ep_size`, `checkpointing`, `dtype` and `optimizer`.
        patched: caps; the stock model if not given.
        bent: whether something grows with the square of the length.

    Raises:
        `ValueError`: as `fake_step`.
    """
    ran = depths_of(config)
    lengths = LENGTHS if patched is None or bent else _KEPT
    one = dataclasses.replace(layout, seq_len=lengths[-1], micro_batch=1, cp_size=1)
    moments = [fake_moments(config, one, lengths, depth=depth, patched=patched) for depth in ran]
    return Counts(config.get_text_config().num_hidden_layers, ran, lengths, moments)


class SchedulesAlone:
    """
    The dispatch and vocabulary schedules of a model, each rehearsed alone.

    Arguments:
        config: of a causal LM.
        layout: of it counts `ep_size`.
        shape: of the same config.
    """

    def __init__(self, config: PreTrainedConfig, layout: Layout, shape: ModelShape) -> None:
        self._config, self._layout, self._shape = config, layout, shape
        self._known: dict[Hashable, Alone] = {}
        self._told: dict[Hashable, _Facts] = {}

    def bytes(self, tokens: int, caps: LongMoEConfig) -> Alone:
        """
        By what is at work (`dispatch`: experts; `dispatch, tokenwise`: shared experts and dense MLPs; `vocab`) and
        phase (`forward`, `backward`): the most that one call holds of the component.

        Arguments:
            tokens: T, of one rank in one forward.
            caps: a part that is `None` gives no bytes.

        Raises:
            `ValueError`: a cap is too small.
        """
        key = (tokens, caps.dispatch, caps.vocab)
        if key not in self._known:
            with without_data(self._config, self._layout), rehearsal(Rehearsal(ignored_labels=1)):
                model = fake_model(self._config, self._layout, depth=depths_of(self._config)[0], patched=caps)
                self._known[key] = {
                    **self._dispatch(model, tokens),
                    "vocab": self._vocab(model, tokens, caps.vocab),
                }
        return self._known[key]

    def extra(
        self, layout: Layout, caps: LongMoEConfig, small: LongMoEConfig, *, alone: bool, most: bool
    ) -> dict[str, dict[str, int]]:
        """
        By what is at work and phase: what `caps` take beyond the `small` ones of a count, in bytes (perhaps below 0).

        Arguments:
            layout: of the step.
            alone: whether one rank's schedule stands for expert parallelism's.
            most: see `Planner.scheduled`.

        Raises:
            `ValueError`: a cap is too small.
        """
        facts = self._facts(caps, layout.ep_size)
        if most:
            found = {
                **{
                    name: dict.fromkeys(_PHASES, facts.dispatch(layout.tokens) if caps.dispatch else 0)
                    for name in _MOE
                },
                "vocab": dict.fromkeys(_PHASES, facts.vocab(layout.tokens) if caps.vocab else 0),
            }
        else:
            own, least = self.bytes(layout.tokens, caps), self.bytes(layout.tokens, small)
            found = {name: {phase: own[name][phase] - least[name][phase] for phase in _PHASES} for name in own}
        if layout.ep_size > 1 and not alone and caps.dispatch is not None:
            most = layout.ep_size * layout.tokens if most else math.ceil(layout.imbalance * layout.tokens)
            found["dispatch"] = dict.fromkeys(_PHASES, facts.dispatch(most, exchanged=True))
        for phases in found.values():  # an output that something saves is computed again
            phases["recompute"] = phases["forward"] if facts.runs_again else 0
        return found

    @cached_property
    def row_bytes(self) -> int:
        """What a row more takes in the stock experts, in backward."""
        few, many = 2**12, 2**13
        with without_data(self._config, self._layout):
            model = fake_model(self._config, self._layout, depth=depths_of(self._config)[0], patched=None)
            experts = next(filter(is_experts, model.modules()))
            highs = [
                _alone("dispatch", list(experts.parameters()), self._rows(experts, tokens), experts)["backward"]
                for tokens in (few, many)
            ]
        return (highs[1] - highs[0]) // ((many - few) * self._shape.top_k)

    def _facts(self, caps: LongMoEConfig, ranks: int) -> _Facts:
        key = (caps.dispatch, caps.vocab, ranks)
        if key not in self._told:
            with without_data(self._config, self._layout):
                model = fake_model(self._config, self._layout, depth=depths_of(self._config)[0], patched=caps)
                self._told[key] = _facts(model, caps, self._shape, ranks)
        return self._told[key]

    def _rows(self, experts: nn.Module, tokens: int) -> list[torch.Tensor]:
        top_k, router = self._shape.top_k, getattr(torch, self._shape.router_dtype)
        return [
            torch.empty(tokens, _hidden(experts), dtype=experts.down_proj.dtype),
            torch.empty(tokens, top_k, dtype=torch.int64),
            torch.empty(tokens, top_k, dtype=router),
        ]

    def _dispatch(self, model: PreTrainedModel, tokens: int) -> Alone:
        """The largest of the kinds of modules."""
        found, kinds = {name: dict.fromkeys(_PHASES, 0) for name in _MOE}, set()
        for module in model.modules():
            schedule = vars(module).get("longmoe_schedule")
            kind = (type(module), tuple(tuple(p.shape) for p in module.parameters()))
            if schedule is None or kind in kinds:
                continue
            kinds.add(kind)
            if isinstance(schedule, LocalDispatch):
                inputs = self._rows(module, tokens)
            else:
                like = _like_input(module)
                inputs = [torch.empty(tokens, like.shape[1], dtype=like.dtype)]
            high = _alone("dispatch", list(module.parameters()), inputs, module)
            own = found[_MOE[not isinstance(schedule, LocalDispatch)]]
            own.update((phase, max(own[phase], high[phase])) for phase in _PHASES)
        return found

    def _vocab(self, model: PreTrainedModel, tokens: int, caps: VocabConfig | None) -> dict[str, int]:
        if caps is None:
            return dict.fromkeys(_PHASES, 0)
        head = model.get_output_embeddings()
        softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        inputs = [torch.empty(tokens, head.weight.shape[1], dtype=head.weight.dtype)]
        labels = torch.empty(tokens, dtype=torch.int64)

        def loss(hidden: torch.Tensor) -> torch.Tensor:
            cap = LogitTransform(softcap=softcap)
            return linear_cross_entropy(hidden, head.weight, labels, bias=head.bias, budget=caps.budget, transform=cap)

        return _alone("vocab", list(head.parameters()), inputs, loss, [labels])


@dataclass(frozen=True)
class _Facts:
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


def _facts(model: PreTrainedModel, caps: LongMoEConfig, shape: ModelShape, ranks: int) -> _Facts:
    local, exchanged, per_token, again = 0, 0, 0, False
    for module in model.modules():
        schedule = vars(module).get("longmoe_schedule")
        if schedule is None:
            continue
        again = again or schedule.output_saved_after
        weights = 4 * sum(p.numel() for p in module.parameters())
        if isinstance(schedule, LocalDispatch):
            hidden, (block, params) = _hidden(module), block_of(module, module.longmoe_kernel)
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
            per_token = max(per_token, schedule.bytes_per_token(module, _like_input(module)) + weights)
    tiles = (0, 0)
    if caps.vocab is not None:
        head = model.get_output_embeddings().weight
        tiles = caps.vocab.budget, tile_bytes(1, *head.shape, dtype=head.dtype, keep_logits=shape.softcap)
    return _Facts((local, exchanged), per_token, tiles, again)


def _alone(
    name: str,
    parameters: list[nn.Parameter],
    inputs: list[torch.Tensor],
    call: Callable[..., torch.Tensor],
    given: Sequence[torch.Tensor] = (),
) -> dict[str, int]:
    for tensor in inputs:
        tensor.requires_grad_(tensor.is_floating_point())
    probe = StorageProbe()
    with probe:
        probe.tag("parameters", [*parameters, *inputs, *given])
        with component(name):
            output = call(*inputs)
        output.backward(torch.ones_like(output))
        probe.tag("gradients", [p.grad for p in parameters])
        for p in parameters:
            p.grad = None
    highs = {phase: 0 for phase in _PHASES}
    for (phase, _), moment in probe.moments().items():
        if phase in highs:
            highs[phase] = max(highs[phase], moment.highs[name])
    return highs


def small_caps(config: PreTrainedConfig, layout: Layout) -> LongMoEConfig:
    """Caps of which a step of four thousand tokens takes several waves and tiles: for `count`."""
    with without_data(config, layout):
        model = fake_model(config, layout, depth=depths_of(config)[0], patched=_roomy())
        per_row = 0
        for module in model.modules():
            schedule = vars(module).get("longmoe_schedule")
            if isinstance(schedule, LocalDispatch):
                block, params = block_of(module, module.longmoe_kernel)
                per_row = max(per_row, 2 * block.bytes_per_row(_hidden(module), params))
            elif isinstance(schedule, TokenTiles):
                per_row = max(per_row, schedule.bytes_per_token(module, _like_input(module)))
        head = model.get_output_embeddings().weight
        vocab = tile_bytes(_ROWS, *head.shape, dtype=head.dtype, keep_logits=True, bias=True)
    return _caps(_ROWS * per_row or 1, vocab)


def _roomy() -> LongMoEConfig:
    return _caps(2**60, 2**60)


def _caps(dispatch: int, vocab: int) -> LongMoEConfig:
    return LongMoEConfig(
        dispatch=DispatchConfig(budget=dispatch),
        vocab=VocabConfig(budget=vocab, schedule="tiles"),
        boundaries=None,
        optimizer=None,
    )


def _hidden(experts: nn.Module) -> int:
    return experts.down_proj.shape[2 if experts.is_transposed else 1]


def _like_input(module: nn.Module) -> torch.Tensor:
    weight = next(p for p in module.parameters() if p.dim() == 2)
    return torch.empty(0, weight.shape[1], dtype=weight.dtype, device="meta")
