"""What the schedules of a model take alone, each rehearsed at the real length and with the real caps."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_longmoe.config import LongMoEConfig, VocabConfig
from hf_longmoe.integrations.transformers.dispatch_modules import PARTS, dispatch_modules
from hf_longmoe.integrations.transformers.experts import hidden_of, is_experts
from hf_longmoe.integrations.transformers.fake_step import fake_model, without_data
from hf_longmoe.integrations.transformers.planning_shape import depths_of
from hf_longmoe.integrations.transformers.schedule_facts import ScheduleFacts, facts_of, like_input
from hf_longmoe.peaks import StorageProbe, component
from hf_longmoe.planner.shape import Layout, ModelShape
from hf_longmoe.schedules.dispatch import LocalDispatch
from hf_longmoe.schedules.rehearsal import Rehearsal, rehearsal
from hf_longmoe.schedules.vocab import LogitTransform, linear_cross_entropy

__all__ = ["SchedulesAlone"]

# By what is at work, then by phase.
Alone = dict[str, dict[str, int]]

_PHASES = ("forward", "backward", "recompute")  # the last: what a backward computes again with grad mode on
_MOE = ("dispatch", *(f"dispatch, {part}" for part in PARTS))


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
        self._depth = depths_of(config)[0]
        self._known: dict[Hashable, Alone] = {}
        self._told: dict[Hashable, ScheduleFacts] = {}

    def bytes(self, tokens: int, caps: LongMoEConfig) -> Alone:
        """
        By what is at work (`dispatch`: experts; `dispatch, shared`; `dispatch, dense`; `vocab`) and phase (`forward`,
        `backward`, `recompute`): the most that one call holds of the component.

        Arguments:
            tokens: T, of one rank in one forward.
            caps: a part that is `None` gives no bytes.

        Raises:
            `ValueError`: a cap is too small.
        """
        key = (tokens, caps.dispatch, caps.vocab)
        if key not in self._known:
            with without_data(self._config, self._layout), rehearsal(Rehearsal(ignored_labels=1)):
                model = self._model(caps)
                self._known[key] = {
                    **self._dispatch(model, tokens),
                    "vocab": self._vocab(model, tokens, caps.vocab),
                }
        return self._known[key]

    def extra(
        self, layout: Layout, caps: LongMoEConfig, small: LongMoEConfig, shortest: int, *, alone: bool, most: bool
    ) -> dict[str, dict[str, int]]:
        """
        By what is at work and phase: what `caps` take beyond the `small` ones of a count, in bytes (perhaps below 0).

        Arguments:
            layout: of the step.
            shortest: tokens of the shortest count.
            alone: whether one rank's schedule stands for expert parallelism's.
            most: see `Planner.scheduled`.

        Raises:
            `ValueError`: a cap is too small.
        """
        facts = self._facts(caps, layout.ep_size)
        if most:
            dispatch = facts.dispatch(layout.tokens) if caps.dispatch else 0
            found = {name: dict.fromkeys(_PHASES, dispatch) for name in _MOE}
            found["vocab"] = dict.fromkeys(_PHASES, facts.vocab(layout.tokens) if caps.vocab else 0)
        else:
            own, least = self.bytes(layout.tokens, caps), self._small(layout.tokens, small, shortest)
            found = {name: {phase: own[name][phase] - least[name][phase] for phase in _PHASES} for name in own}
        if layout.ep_size > 1 and not alone and caps.dispatch is not None:
            fullest = layout.ep_size if most else layout.imbalance
            received = facts.dispatch(math.ceil(fullest * layout.tokens), exchanged=True)
            found["dispatch"] = dict.fromkeys(_PHASES, received)
        for phases in found.values():  # an output that something saves is computed again
            phases["recompute"] = max(phases["recompute"], phases["forward"] if facts.runs_again else 0)
        return found

    def _small(self, tokens: int, small: LongMoEConfig, shortest: int) -> Alone:
        """Below the shortest count on the line that the counts are on, too: there the small caps bind."""
        if tokens >= shortest:
            return self.bytes(tokens, small)
        a, b = self.bytes(shortest, small), self.bytes(2 * shortest, small)
        return {
            name: {
                phase: a[name][phase] - (b[name][phase] - a[name][phase]) * (shortest - tokens) // shortest
                for phase in _PHASES
            }
            for name in a
        }

    @cached_property
    def row_bytes(self) -> int:
        """What a row more takes in the stock experts, in backward."""
        few, many = 2**12, 2**13
        with without_data(self._config, self._layout):
            model = self._model(None)
            experts = next(filter(is_experts, model.modules()))
            highs = [
                _alone("dispatch", list(experts.parameters()), self._rows(experts, tokens), experts)["backward"]
                for tokens in (few, many)
            ]
        return (highs[1] - highs[0]) // ((many - few) * self._shape.top_k)

    def _facts(self, caps: LongMoEConfig, ranks: int) -> ScheduleFacts:
        key = (caps.dispatch, caps.vocab, ranks)
        if key not in self._told:
            with without_data(self._config, self._layout):
                model = self._model(caps)
                self._told[key] = facts_of(model, caps, self._shape, ranks)
        return self._told[key]

    def _model(self, caps: LongMoEConfig | None) -> PreTrainedModel:
        return fake_model(self._config, self._layout, depth=self._depth, patched=caps)

    def _rows(self, experts: nn.Module, tokens: int) -> list[torch.Tensor]:
        top_k, router = self._shape.top_k, getattr(torch, self._shape.router_dtype)
        return [
            torch.empty(tokens, hidden_of(experts), dtype=experts.down_proj.dtype),
            torch.empty(tokens, top_k, dtype=torch.int64),
            torch.empty(tokens, top_k, dtype=router),
        ]

    def _dispatch(self, model: PreTrainedModel, tokens: int) -> Alone:
        """The largest of the kinds of modules of each part."""
        found, kinds = {name: dict.fromkeys(_PHASES, 0) for name in _MOE}, set()
        for part in dispatch_modules(model):
            module, schedule = part.module, vars(part.module).get("longmoe_schedule")
            kind = (type(module), part.part, tuple(tuple(p.shape) for p in module.parameters()))
            if schedule is None or kind in kinds:
                continue
            kinds.add(kind)
            if isinstance(schedule, LocalDispatch):
                inputs = self._rows(module, tokens)
            else:
                like = like_input(module)
                inputs = [torch.empty(tokens, like.shape[1], dtype=like.dtype)]
            high = _alone("dispatch", list(module.parameters()), inputs, module)
            own = found[f"dispatch, {part.part}" if part.part else "dispatch"]
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
