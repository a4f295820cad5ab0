"""
Every MoE family of Transformers, patched: what schedules take over, what is left alone and why, and that it is exact.

`python -m benchmarks.every_family > docs/families.md` writes the table.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from benchmarks.expert_plans import plan_cell
from benchmarks.families import FAMILIES, small_config
from benchmarks.own_blocks import OWN_BLOCKS, small_own_block
from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig, patch_model
from hf_longmoe.integrations.transformers.patch import Entry
from hf_longmoe.integrations.transformers.planning_shape import build

__all__ = ["EVERY", "Checked", "caps_of", "check", "drawn", "model_of", "row"]

EVERY = tuple(sorted((*FAMILIES, *OWN_BLOCKS)))
_WIDTHS = ("moe_", "shared_", "shared_expert_", "moe_shared_expert_", "dense_", "shared_experts_")
_SIZES: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=48,
    mamba_n_heads=2,
    **{f"{width}intermediate_size": 24 for width in _WIDTHS},
)
# What they have beside their text, or its rotary sections, wants the hidden size that it is given for.
_WIDER = ("ernie4_5_vl_moe", "glm4v_moe", "muse_spark")
# Several waves and tiles of 40 tokens.
_DISPATCH, _WIDER_DISPATCH, _VOCAB = "96KiB", "192KiB", "400KiB"
_COLUMNS = ("family", "experts", "shared, dense", "LM head", "router loss", "EP plan")
_LENGTH, _LABELLED = 20, 16


def caps_of(family: str) -> LongMoEConfig:
    dispatch = _WIDER_DISPATCH if family in _WIDER else _DISPATCH
    return LongMoEConfig(dispatch=DispatchConfig(budget=dispatch), vocab=VocabConfig(budget=_VOCAB))


def config_of(family: str) -> PreTrainedConfig:
    if family in OWN_BLOCKS:
        return small_own_block(family)
    return small_config(family, **({} if family in _WIDER else _SIZES))


def model_of(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A tiny model in training mode, of weights drawn from seed 0, whose experts run as `eager`."""
    torch.manual_seed(0)
    config = config_of(family)
    if config.is_encoder_decoder:
        model = AutoModelForSeq2SeqLM.from_config(config)
    elif family == "openai_privacy_filter":
        model = AutoModelForTokenClassification.from_config(config)
    else:
        model = build(config, torch.float32)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() > 1:  # the default 0.02 makes experts too quiet to test
                param.normal_(0, 0.5 / param.shape[-1] ** 0.5 if "embed" not in name else 1.0)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # a hash router's: by default each token's experts are one and the same
                table.copy_(torch.rand(len(table), model.config.num_local_experts).topk(table.shape[1]).indices)
    model = model.to(dtype).train()
    if family in FAMILIES:
        model.set_experts_implementation("eager")
    return model


@dataclass(frozen=True)
class Checked:
    """
    Arguments:
        entries: the report of `patch_model`.
        loss, gradient: largest relative errors against the stock path; a gradient's is of its largest element.
        worst: the parameter of the latter.
        without: parameters that have a gradient on one path only.
    """

    entries: list[Entry]
    loss: float
    gradient: float
    worst: str
    without: set[str]


def check(family: str, checkpointing: bool = True) -> Checked:
    """
    Loss and gradients of a patched model beside the stock ones, in float64: `Widened`, where a model computes in
    float32 whatever its dtype.

    Arguments:
        checkpointing: run the patched model's layers under non-reentrant activation checkpointing, where it can.
    """
    model = model_of(family)
    torch.manual_seed(1)
    ids = torch.randint(3, 1900, (2, _LENGTH))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    labels = ids.clone()
    labels[0, : _LENGTH - _LABELLED] = -100
    with Widened():
        with drawn():
            logits = model(**inputs).logits
        projection = torch.randn_like(logits)
        labelled = head_is_patched(model, caps_of(family))
        if labelled:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        else:
            loss = (logits * projection).sum()
        grads = _gradients(model, loss)
        patch_model(model, caps_of(family))
        if checkpointing and model.supports_gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        with drawn():
            got = model(**inputs, labels=labels).loss if labelled else (model(**inputs).logits * projection).sum()
        found = _gradients(model, got)
    errors = {name: _error(found[name], want) for name, want in grads.items() if name in found}
    worst = max(errors, key=errors.get)
    loss_error = abs((got - loss) / loss).item()
    return Checked(model.longmoe.entries, loss_error, errors[worst], worst, grads.keys() ^ found.keys())


@contextlib.contextmanager
def drawn() -> Iterator[None]:
    """A router that draws (phimoe's) draws the same."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        yield


def head_is_patched(model: PreTrainedModel, caps: LongMoEConfig) -> bool:
    with patch_model(model, caps).longmoe as patched:
        return any(entry.component == "vocab" and entry.schedule for entry in patched.longmoe.entries)


def _gradients(model: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative to the largest element; that of a gradient of zeros is whether the other is zeros too."""
    difference, largest = (got - want).abs().max().item(), want.abs().max().item()
    return difference / largest if largest else float(difference > 0)


class Widened(TorchDispatchMode):
    """Float64 tensors stay so where a model asks for float32 ones of them: routers, soft caps, sums of experts."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") == torch.float32 and getattr(args[0], "dtype", None) == torch.float64:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


# -- the table -------------------------------------------------------------------------------------------------------
def row(family: str, entries: list[Entry], config: PreTrainedConfig) -> str:
    """The family's line of `docs/families.md`."""

    def said(*wanted: bool | str) -> str:
        return "; ".join(dict.fromkeys(filter(None, wanted))) or "–"

    experts = [e for e in entries if e.component == "dispatch" and e.schedule != "token tiles"]
    tiled = {e.module.rpartition(".")[2] for e in entries if e.schedule == "token tiles"}
    heads = [e for e in entries if e.component == "vocab"]
    cells = (
        family,
        said(*("left alone: " + e.note if e.schedule is None else _how(e.note) for e in experts)),
        said(*sorted(tiled)),
        said(*("left alone: " + e.note if e.schedule is None else e.schedule for e in heads)),
        "sums by layer" if any(e.component == "aux" for e in entries) else "–",
        plan_cell(family, config),
    )
    return f"| {' | '.join(cells)} |"


def _how(note: str) -> str:
    return "written out" if "written-out" in note else "the model's kernel"


def table() -> Iterator[str]:
    """Of all families; a minute or two."""
    yield "# MoE families"
    yield ""
    yield (
        f"What `patch_model` does with each MoE family of Transformers {transformers.__version__}. Written by `python"
        " -m benchmarks.every_family`; `tests/invariant/test_every_family.py` holds each line, and loss and gradients"
        " to 1e-12 of the stock path's in float64."
    )
    yield ""
    yield "- experts: waves whose backward is written out, or in which the model's own kernel runs"
    yield "- shared, dense: which of its shared experts and dense MLPs run in token tiles"
    yield (
        "- EP plan: whether Transformers divides its experts over ranks, which PipelinedLLEP then serves: a step on"
        " two ranks through FSDP2 is that of one process, in float32 (`tests/distributed/test_every_family_ep.py`)"
    )
    yield ""
    yield f"| {' | '.join(_COLUMNS)} |"
    yield f"|{'---|' * len(_COLUMNS)}"
    for family in EVERY:
        yield row(family, *reported(family))


def reported(family: str) -> tuple[list[Entry], PreTrainedConfig]:
    """What `patch_model` reports, also where it refuses for having nothing to do."""
    model = model_of(family, torch.float32)
    try:
        return patch_model(model, caps_of(family)).longmoe.entries, model.config
    except ValueError as error:
        found = re.findall(r"(\S+): (\w+), left alone \((.*?)\)(?=[;.])", str(error))
        if not found:
            raise
        return [Entry(module, component, None, note) for module, component, note in found], model.config


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for line in table():
        print(line)
