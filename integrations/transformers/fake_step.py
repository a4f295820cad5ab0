"""The fake step: a training step without data, under the probe. What the planner's closed forms are held to.

It is a step on one rank, on the host's kernels. What is not in it: the collectives' buffers (FSDP2's gathered layers,
expert parallelism's exchange), scratch inside a kernel, offloading (`boundaries` and `optimizer` of a config).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from hf_longmoe.config import LongMoEConfig
from hf_longmoe.integrations.transformers.experts import hidden_of, is_experts
from hf_longmoe.integrations.transformers.fake_attention import plan_attention, plan_mask
from hf_longmoe.integrations.transformers.patch import patch_model
from hf_longmoe.integrations.transformers.planning_shape import at_depth, build, depths_of, on_meta
from hf_longmoe.integrations.transformers.regions import watch
from hf_longmoe.peaks import PeakReport, StorageProbe
from hf_longmoe.planner.depth import Moments, extrapolate
from hf_longmoe.planner.shape import Layout
from hf_longmoe.schedules.dispatch import LocalDispatch
from hf_longmoe.schedules.rehearsal import Rehearsal, rehearsal

__all__ = ["ATTENTION", "fake_model", "fake_moments", "fake_step", "two_depths", "without_data"]

ATTENTION = "longmoe_plan"
_FEW = 16  # tokens a sequence of the first step, whose only use is the optimizer's state
AttentionInterface.register(ATTENTION, plan_attention)
AttentionMaskInterface.register(ATTENTION, plan_mask)


def fake_step(
    config: PreTrainedConfig, layout: Layout, *, depth: int | None = None, patched: LongMoEConfig | None = None
) -> PeakReport:
    """
    The peaks of one rank's training step (forward, backward, AdamW's update), the second of two.

    One rank stands for all: it has `layout.tokens` tokens and E / ep_size experts of each layer, which take T·k rows,
    as many as balanced routing sends them from all ranks. Router, and all that is not experts, are whole. Under
    `cp_size` its tokens attend with all heads, which is as many bytes as all tokens with their share of the heads.
    Parameters, gradients and optimizer state are not divided by `fsdp_size`.

    Arguments:
        config: of a causal LM; see `shape_of`.
        layout: see `Layout`; `dtype` must be `"bfloat16"`, in which alone `grouped_mm` runs without data.
        depth: layers; all of the config's if not given.
        patched: the caps to patch with (`dispatch` and `vocab`); the stock model if not given.

    Raises:
        `ValueError`: the config builds no causal LM, its experts cannot run without data, the layout does not fit it,
            or a cap is too small for it.
    """
    return _run(config, layout, depth, patched)[0]


def two_depths(
    config: PreTrainedConfig,
    layout: Layout,
    *,
    patched: LongMoEConfig | None = None,
    depths: tuple[int, ...] | None = None,
) -> tuple[tuple[int, ...], PeakReport]:
    """
    The peaks at the config's real depth, from fake steps at two small ones with the same pattern of layers.

    Arguments:
        depths: the two, `depths_of(config)` if not given.

    Returns:
        The depths that were run, and the report (see `planner.depth.extrapolate`).
    """
    ran = depths or depths_of(config)
    results = [_run(config, layout, depth, patched) for depth in ran]
    if len(ran) == 1:
        return ran, results[0][0]
    reports, moments = zip(*results, strict=True)
    return ran, extrapolate(ran, reports, moments, config.get_text_config().num_hidden_layers)


def fake_moments(
    config: PreTrainedConfig,
    layout: Layout,
    lengths: Sequence[int],
    *,
    depth: int | None = None,
    patched: LongMoEConfig | None = None,
) -> list[Moments]:
    """
    As `fake_step`, of one model at several `lengths` (tokens of a sequence on the rank, ascending).

    Returns:
        For each length, what each component held in each phase while one of them was at work.
    """
    cut = config if depth is None else at_depth(config, depth)
    with without_data(config, layout):
        return [probe.moments() for probe in _steps(cut, layout, patched, lengths, given=_given(layout))]


def _run(
    config: PreTrainedConfig, layout: Layout, depth: int | None, patched: LongMoEConfig | None
) -> tuple[PeakReport, Moments]:
    cut = config if depth is None else at_depth(config, depth)
    with without_data(config, layout):
        return run_step(cut, layout, patched, given=_given(layout))


def _given(layout: Layout) -> Rehearsal:
    return Rehearsal(ignored_labels=layout.micro_batch)


@contextlib.contextmanager
def without_data(config: PreTrainedConfig, layout: Layout) -> Iterator[None]:
    """
    Fake tensors inside.

    Raises:
        `ValueError`: the layout's dtype has no fake step, or what is run inside needs data.
    """
    if layout.dtype != "bfloat16":
        raise ValueError(f'dtype={layout.dtype!r}: a fake step runs in "bfloat16" only (grouped_mm, without data).')
    meta = logging.getLogger("torch._subclasses.fake_tensor")
    level = meta.level
    try:
        meta.setLevel(logging.CRITICAL)  # what does not fit together is told below
        with FakeTensorMode(), _no_autocast():
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"config of model type {config.model_type!r}: this model cannot run without data ({error}); a fake step"
            " takes no model whose shapes depend on values (a loop over the experts that were hit, say)."
        ) from error
    except RuntimeError as error:
        problem = str(error).strip().splitlines()[0]
        raise ValueError(
            f"config of model type {config.model_type!r}: its sizes do not fit together ({problem})."
        ) from error
    finally:
        meta.setLevel(level)


def run_step(
    config: PreTrainedConfig,
    layout: Layout,
    patched: LongMoEConfig | None,
    *,
    attention: str = ATTENTION,
    given: Rehearsal | None = None,
    prepare: Callable[[PreTrainedModel], Any] = lambda model: None,
) -> tuple[PeakReport, Moments]:
    """
    The step itself: rehearsed, on fake tensors; or real, outside of `FakeTensorMode`.

    Arguments:
        attention: the attention implementation.
        given: what the rehearsal is given; a real step if `None`.
        prepare: what is done to the model before its first step.
    """
    lengths = [layout.local_seq_len]
    (probe,) = _steps(config, layout, patched, lengths, attention=attention, given=given, prepare=prepare)
    return probe.report(), probe.moments()


def _steps(
    config: PreTrainedConfig,
    layout: Layout,
    patched: LongMoEConfig | None,
    lengths: Sequence[int],
    *,
    attention: str = ATTENTION,
    given: Rehearsal | None = None,
    prepare: Callable[[PreTrainedModel], Any] = lambda model: None,
) -> Iterator[StorageProbe]:
    model = _model(config, layout, patched, attention, given is not None)
    if layout.checkpointing != "off":
        kind = {"use_reentrant": layout.checkpointing == "reentrant"}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kind)
    optimizer = _optimizer(model, layout)
    prepare(model)
    ids = [torch.zeros(layout.micro_batch, length, dtype=torch.int64) for length in (_FEW, *lengths)]
    with contextlib.nullcontext() if given is None else rehearsal(given), watch(model, optimizer):
        _step(model, optimizer, ids[0])
        for some in ids[1:]:
            probe = StorageProbe()
            with probe:
                _step(model, optimizer, some)
            yield probe


def fake_model(
    config: PreTrainedConfig, layout: Layout, *, depth: int, patched: LongMoEConfig | None
) -> PreTrainedModel:
    """The model of a fake step; to be made and used within `without_data`."""
    return _model(at_depth(config, depth), layout, patched, ATTENTION, fake=True)


def _model(
    config: PreTrainedConfig, layout: Layout, patched: LongMoEConfig | None, attention: str, fake: bool
) -> PreTrainedModel:
    make = on_meta if fake else build
    model = make(config, getattr(torch, layout.dtype), attn_implementation=_of_the_text(config, attention))
    if fake:
        _to_host(model)
    model.config.use_cache = False
    if any(m.config._experts_implementation != "grouped_mm" for m in model.modules() if is_experts(m)):
        model.set_experts_implementation("grouped_mm")
    _share_experts(model, layout.ep_size)
    if patched is not None:
        patch_model(model, patched)
        model.longmoe.launch_checked = True  # it is one rank alone, whatever this process was launched for
        if fake:
            _balance(model)
    return model


def _of_the_text(config: PreTrainedConfig, attention: str) -> str | dict[str, str]:
    """A vision tower keeps its own attention: no images are planned, and it may know no other."""
    return {"text_config": attention} if config.get_text_config() is not config else attention


def _to_host(model: PreTrainedModel) -> None:
    """From `meta`: parameters and buffers of the same sizes, those that are shared still so."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device.type != "meta":
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype)
                    parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
                tensors[name] = made[id(tensor)]


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    loss = model(input_ids=ids, labels=ids).loss
    if loss is None:
        raise ValueError(f"{type(model).__name__} gives no loss for labels: no training step of it is planned.")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _no_autocast() -> contextlib.AbstractContextManager:
    return torch.autocast("cpu", enabled=False)


def _share_experts(model: PreTrainedModel, ranks: int) -> None:
    """Leaves each experts module one rank's experts. Its indices still mean all: no value is ever read."""
    for name, module in model.named_modules():
        if ranks == 1 or not is_experts(module):
            continue
        count = module.num_experts
        if count % ranks:
            raise ValueError(f"ep_size={ranks} does not divide the {count} experts of {name}.")
        for owner in module.modules():
            for key, p in list(owner.named_parameters(recurse=False)):
                if p.shape[0] == count:
                    setattr(owner, key, nn.Parameter(torch.empty_like(p[: count // ranks]), p.requires_grad))
        module.num_experts = count // ranks


def _balance(model: PreTrainedModel) -> None:
    """Each expert is given as many rows, in every block of tokens, without a look at the data."""
    top_k: dict[nn.Module, int] = {}
    for module in model.modules():
        schedule = vars(module).get("longmoe_schedule")
        if isinstance(schedule, LocalDispatch):
            module.longmoe_schedule = dataclasses.replace(schedule, count_rows=_balanced(schedule, module, top_k))
            module.register_forward_pre_hook(lambda m, args: top_k.update({m: args[1].shape[-1]}))


def _balanced(
    schedule: LocalDispatch, experts: nn.Module, top_k: dict[nn.Module, int]
) -> Callable[[torch.Tensor, int], list[int]]:
    down, hidden = experts.down_proj, hidden_of(experts)

    def count_rows(keys: torch.Tensor, bins: int) -> list[int]:
        count, total = experts.num_experts, keys.numel()
        if bins == count:
            return spread(total, count)
        tokens = total // top_k[experts]
        size = schedule.token_block(torch.empty(tokens, hidden, dtype=down.dtype, device="meta"))
        counts: list[int] = []
        for start in range(0, tokens, size):  # one more bin a block, for what is no expert's
            counts += [*spread(min(size, tokens - start) * top_k[experts], count), 0]
        return counts

    return count_rows


def spread(total: int, bins: int) -> list[int]:
    """`total` over `bins`, as evenly as can be: the first have one more."""
    return [total // bins + (b < total % bins) for b in range(bins)]


def _optimizer(model: PreTrainedModel, layout: Layout) -> torch.optim.Optimizer:
    how = {"fused": dict(fused=True), "foreach": dict(foreach=True), "for-loop": dict(foreach=False)}
    return torch.optim.AdamW(model.parameters(), **how[layout.optimizer])
