"""Which MoE families Transformers divides over ranks by expert, and how their weights get there where it fails to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["LEFT_OUT", "LOADING", "Loading", "experts_in_plan", "load", "plan_cell", "save"]


@dataclass(frozen=True)
class Loading:
    """
    What a family needs to be loaded on several ranks, where `save_pretrained` and `from_pretrained` alone fail.

    Arguments:
        needs: for the table.
        error: a part of what Transformers raises otherwise; `None` where it loads other weights and says nothing.
        layout: of the saved weights: "model" as the model has them (`save_original_format=False`), "original" as the
            family's first checkpoints have them, "transposed" with each expert's matrices so.
        experts_only: whether the plan is to have the rules for the experts only.
    """

    needs: str
    error: str | None
    layout: str = "original"
    experts_only: bool = False


_CONVERTS = "yes, saved with `save_original_format=False`: else Transformers converts the parts of each rank, and "
# Sizes that do not match, or a conversion that failed; which, may differ from rank to rank.
_REPORT = "above report"
_REFUSED = Loading(_CONVERTS + "raises", _REPORT, layout="model")
_WRONG = Loading(_CONVERTS + "loads wrong convolutions", None, layout="model")
_RULES = Loading(
    "yes, without the plan's rules for the dense MLPs: with them, Transformers raises under FSDP2",
    "Cannot concatenate overlapping meshes",
    experts_only=True,
)
LOADING: dict[str, Loading] = {
    **dict.fromkeys(("bailing_hybrid", "glm5_next", "kimi_linear"), _WRONG),
    **dict.fromkeys(("ernie4_5_vl_moe", "inkling2", "inkling2_loop", "lara_mini"), _REFUSED),
    "qwen3_vl_moe": Loading(
        "yes, in the layout of its first checkpoints: of a model saved again, Transformers transposes the parts of"
        " each rank, and raises",
        _REPORT,
        layout="transposed",
    ),
    **dict.fromkeys(("diffusion_gemma", "gemma4"), _RULES),
}
LEFT_OUT: dict[str, str] = {
    "diffusion_gemma": "no: its encoder and decoder share weights, with which Transformers crashes under FSDP2 alone",
}


def experts_in_plan(config: PreTrainedConfig) -> bool:
    """Whether the family's plan divides its experts."""
    plan = getattr(config.get_text_config(), "base_model_ep_plan", None) or {}
    return "ep_dispatch_experts" in plan.values()


def plan_cell(family: str, config: PreTrainedConfig) -> str:
    """For the table."""
    if not experts_in_plan(config):
        return "–"
    if family in LEFT_OUT:
        return LEFT_OUT[family]
    return LOADING[family].needs if family in LOADING else "yes"


def save(family: str, model: PreTrainedModel, folder: str | Path) -> None:
    """Saves the weights in the layout that the family can be loaded from on several ranks."""
    layout = LOADING[family].layout if family in LOADING else "original"
    if layout == "transposed":
        state = {n: w.mT.contiguous() if ".experts." in n else w for n, w in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=state, save_original_format=False)
    else:
        model.save_pretrained(folder, save_original_format=layout == "original")


def load(family: str, kind: type[PreTrainedModel], folder: str | Path, **options: Any) -> PreTrainedModel:
    """
    What `save` has saved, with the plan that the family can be loaded with on several ranks.

    Arguments:
        kind: the model's class.
        options: of `from_pretrained`.
    """
    if family in LOADING and LOADING[family].experts_only:
        config = kind.config_class.from_pretrained(folder)
        text = config.get_text_config()
        text.base_model_ep_plan = {name: rule for name, rule in text.base_model_ep_plan.items() if ".experts" in name}
        options["config"] = config
    return kind.from_pretrained(folder, **options)
