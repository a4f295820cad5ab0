"""
Predicted peaks beside measured ones, for every MoE family and a few real models.

A small model of each family runs a real training step under the probe, stock and patched, and each component's peak is
set beside the planner's. Real configs, and longer sequences, are set beside fake steps at two depths instead.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.box import SIMPLE
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from benchmarks import report
from benchmarks.families import FAMILIES, small_config
from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig
from hf_longmoe.integrations.transformers.experts import is_experts
from hf_longmoe.integrations.transformers.fake_step import ATTENTION, run_step, two_depths
from hf_longmoe.integrations.transformers.planning import Planner
from hf_longmoe.peaks import PeakReport
from hf_longmoe.planner import Layout
from hf_longmoe.planner.verification import Row, compare
from hf_longmoe.sizes import format_bytes, format_tokens

__all__ = ["FAKE", "REAL", "SCHEMA", "STAND_IN", "THREADS", "PlannerCase", "cases", "measure", "table"]

THREADS = 1
_GATE = 0.03
_TOKENS, _LONGER = 2048, 16384
# Several waves and tiles at 2,048 tokens.
_SMALL_CAPS = LongMoEConfig(
    dispatch=DispatchConfig(budget="4MiB"), vocab=VocabConfig(budget="4MiB"), boundaries=None, optimizer=None
)
_DEFAULT_CAPS = dataclasses.replace(LongMoEConfig(), boundaries=None, optimizer=None)
_QUICK = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
_LONGER_FAMILIES = ("mixtral", "deepseek_v3", "deepseek_v32", "gpt_oss", "nemotron_h", "qwen3_next")
_RANKS, _REAL_LENGTHS = 64, (2**16, 2**19, 2**20)
# Real models by name: their configs, and among how many of the ranks their experts are divided.
REAL: dict[str, tuple[dict[str, Any], int]] = {
    "Mixtral-8x7B": (dict(model_type="mixtral"), 8),
    "gpt-oss-120b": (dict(model_type="gpt_oss"), 64),
    "DeepSeek-V3": (dict(model_type="deepseek_v3"), 64),
    "Qwen3-30B-A3B": (
        dict(
            model_type="qwen3_moe",
            num_hidden_layers=48,
            hidden_size=2048,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151936,
        ),
        64,
    ),
}
# Families whose attention torch's own kernel would do with a matrix of S x S on the CPU, or not at all: their real
# step has the fake step's stand-in for a fused kernel.
STAND_IN = {
    **dict.fromkeys(
        ("afmoe", "beam", "cohere2_moe", "diffusion_gemma", "exaone_moe", "gemma4", "kolibri1", "laguna", "mellum"),
        "a sliding window",
    ),
    **dict.fromkeys(("muse_spark", "unlimited_ocr"), "a sliding window"),
    **dict.fromkeys(
        ("deepseek_v4", "flint", "gpt_oss", "granitemoe_swa", "hy_v4", "hy_v4_vl", "mimo_v2_flash"), "attention sinks"
    ),
    **dict.fromkeys(("inkling", "inkling2", "inkling2_loop"), "a bias by distance"),
    **dict.fromkeys(
        ("axk2", "deepseek_v32", "dots3_note", "glm5_next", "glm_moe_dsa", "minimax_m3_vl", "mistral_large4"),
        "an indexer's choice of positions",
    ),
    **dict.fromkeys(
        ("qwen4_exp",),
        "an indexer's choice of positions",
    ),
}
# Families whose real step cannot be compared: why; measured by fake steps.
FAKE: dict[str, str] = {}
_BYTES, _SHARE = {"type": ["integer", "null"]}, {"type": ["number", "null"], "minimum": 0}
_COMPARED = {
    "component": {"type": ["string", "null"]},
    "predicted_bytes": _BYTES,
    "measured_bytes": _BYTES,
    "difference": _SHARE,
}
_CASE = {
    **_COMPARED,
    "case": {"type": "string"},
    "total_difference": _SHARE,
    "rows": {"type": "array", "items": {"type": "object", "properties": _COMPARED, "required": list(_COMPARED)}},
    "gate": {"type": "boolean"},
    "limits": {"type": "object", "additionalProperties": {"type": "number"}},
}
# A case that could not be planned or measured has a `problem`, and null in place of numbers.
SCHEMA = {
    **report.SCHEMA,
    "properties": {
        **report.SCHEMA["properties"],
        "cases": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "object", "properties": _CASE, "required": list(_CASE)},
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class PlannerCase:
    """
    One row of the table.

    Arguments:
        name (`str`): the model, the layout and the way of running.
        compared (`Callable`): predicts and measures: the rows, and more of the entry.
        gate (`bool`): whether a missed limit fails the command.
    """

    name: str
    compared: Callable[[], tuple[list[Row], dict[str, Any]]]
    gate: bool = True
    grows_from: None = None


def cases(quick: bool) -> list[PlannerCase]:
    """`quick`: four families, with checkpointing."""
    found = []
    for family in _QUICK if quick else FAMILIES:
        for checkpointing in ("non-reentrant",) if quick else ("non-reentrant", "off"):
            layout = Layout(seq_len=_TOKENS, checkpointing=checkpointing)
            found += _both(f"{family}, {checkpointing}", family, layout, _SMALL_CAPS)
    if quick:
        return found
    for family in _LONGER_FAMILIES:
        layout = Layout(seq_len=_LONGER)
        found += _both(f"larger, fake step: {family}, T {layout.seq_len}", family, layout, _SMALL_CAPS)
    for name, (_, ep_size) in REAL.items():
        for length in _REAL_LENGTHS:
            layout = Layout(seq_len=length, world_size=_RANKS, ep_size=ep_size)
            label = f"larger, fake step: {name}, ep {ep_size} of {_RANKS} ranks, T {format_tokens(length)}"
            found += _both(label, name, layout, _DEFAULT_CAPS)
    return found


def _both(label: str, model: str, layout: Layout, caps: LongMoEConfig) -> list[PlannerCase]:
    ways = {"unbounded": None, "scheduled": caps}
    return [
        PlannerCase(name=f"{label}, {way}", compared=functools.partial(_compared, model, layout, given))
        for way, given in ways.items()
    ]


def table(result: dict[str, Any]) -> Table:
    """The worst component of each case."""
    where = result["environment"]
    view = Table(
        title=f"{result['name']}: transformers {where['transformers']}, torch {where['torch']}",
        caption="The component that is furthest off, of those of a thousandth of the total and more; the total's own "
        f"difference below. Gate: whether both must be within {_GATE:.0%}.",
        box=SIMPLE,
    )
    view.add_column("case", min_width=24)
    for name in ("worst component", "predicted", "measured", "difference\n(total)", "gate"):
        view.add_column(name, justify="right")
    for entry in result["cases"]:
        gate = "" if not entry["gate"] else "[red]missed[/]" if report.missed(entry) else "[green]met[/]"
        if "problem" in entry:
            view.add_row(entry["case"], entry["problem"], "-", "-", "-", gate)
            continue
        sizes = (format_bytes(entry[name]) for name in ("predicted_bytes", "measured_bytes"))
        differences = f"{entry['difference']:.2%}\n({entry['total_difference']:.2%})"
        view.add_row(entry["case"], entry["component"], *sizes, differences, gate)
    return view


def measure(
    case: PlannerCase, earlier: dict[str, dict], pairs: int, threads: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """A case's entry in the JSON; what cannot be planned or measured has the reason in place of bytes."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")  # of models that are built without data
    logging.getLogger("transformers").setLevel(logging.ERROR)
    entry: dict[str, Any] = {"case": case.name, "gate": case.gate, "limits": dict(_LIMITS)}
    entry |= dict.fromkeys(("predicted_bytes", "measured_bytes", "difference", "total_difference"))
    begun = time.perf_counter()
    try:
        rows, more = case.compared()
    except Exception as error:  # whatever it is, it is this case's result
        return entry | {"component": None, "rows": [], "problem": f"{type(error).__name__}: {error}"}
    parts = [_row(row) for row in rows]
    worst = max(parts[:-1], key=lambda part: part["difference"])
    entry |= worst | {"total_difference": parts[-1]["difference"], "rows": parts}
    return entry | more | {"seconds": round(time.perf_counter() - begun, 1)}


_LIMITS = {"difference": _GATE, "total_difference": _GATE}


def _row(row: Row) -> dict[str, Any]:
    difference = row.difference if row.measured else float(row.predicted > 0)
    return {
        "component": row.component,
        "predicted_bytes": row.predicted,
        "measured_bytes": row.measured,
        "difference": difference,
    }


# -- one case --------------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=1)
def _planner(model: str, world_size: int, ep_size: int, checkpointing: str) -> Planner:
    """What it counts serves all lengths and caps: cases that share it come one after the other."""
    layout = Layout(seq_len=_TOKENS, world_size=world_size, ep_size=ep_size, checkpointing=checkpointing)
    if model in FAMILIES:
        return Planner(small_config(model), layout)
    values, _ = REAL[model]
    return Planner(AutoConfig.for_model(**values), layout)


def _compared(model: str, layout: Layout, caps: LongMoEConfig | None) -> tuple[list[Row], dict[str, Any]]:
    planner = _planner(model, layout.world_size, layout.ep_size, layout.checkpointing)
    if caps is None:
        predicted = planner.unbounded(layout, alone=True)
    else:
        predicted = planner.scheduled(caps, layout, alone=True)
    if model in REAL or model in FAKE or layout.seq_len > _TOKENS:
        ran, measured = two_depths(planner.config, layout, patched=caps, depths=planner.depths)
        more = {"measured_by": f"fake steps of {' and '.join(map(str, ran))} layers"}
        return compare(predicted, measured), more | ({"why": FAKE[model]} if model in FAKE else {})
    attention = ATTENTION if model in STAND_IN else "sdpa"
    measured = _real(planner.config, layout, caps, attention, planner.shape.top_k)
    why = {"why": f"{STAND_IN[model]}: a stand-in for attention"} if model in STAND_IN else {}
    return compare(predicted, measured), {"measured_by": "a real step", "attention": attention} | why


def _real(
    config: PreTrainedConfig, layout: Layout, caps: LongMoEConfig | None, attention: str, top_k: int
) -> PeakReport:
    torch.manual_seed(0)
    evenly = functools.partial(_route_evenly, tokens=layout.tokens, top_k=top_k)
    with _ProductsInFloat32():
        return run_step(config, layout, caps, attention=attention, prepare=evenly)[0]


_aten = torch.ops.aten
_PRODUCTS = (
    _aten.mm.default,
    _aten.mm.out,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


class _ProductsInFloat32(TorchDispatchMode):
    """Beneath the probe, which sees the same storages: a CPU without bfloat16 takes ten times as long for these."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        out = kwargs.pop("out", None)
        args, kwargs = tree_map_only(torch.Tensor, _widened, (args, kwargs))
        found = _aten.mm.default(*args) if out is not None else func(*args, **kwargs)
        if out is not None:
            return out.copy_(found)
        if func is _aten._scaled_dot_product_flash_attention_for_cpu.default:  # its log-sum-exp is float32
            return found[0].bfloat16(), found[1]
        return tree_map_only(torch.Tensor, torch.Tensor.bfloat16, found)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _route_evenly(model: PreTrainedModel, tokens: int, top_k: int) -> None:
    """Token i's slot j goes to expert (i + j) mod E, whatever its router says."""
    tables = {}  # made here, so that the step itself allocates nothing for it

    def route(experts: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        args[1].data.copy_(tables[experts][: len(args[1])])

    for module in filter(is_experts, model.modules()):
        tables[module] = (torch.arange(tokens)[:, None] + torch.arange(top_k)) % module.num_experts
        module.register_forward_pre_hook(route, prepend=True)
