"""What a model family does around its experts, as data. Everything else is found by interface."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAMILIES", "Family", "family_of"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """
    One row; the defaults are right for every family, and cost a family that could do better only time.

    Arguments:
        output_saved_after: whether something after the experts, in the same decoder layer, saves a tensor that depends
            on their output (a norm after the block does; an addition, or a product with a constant, does not).
            `False` lets a replay under checkpointing skip the experts.
        shared: names, within the MoE block, of shared experts that take each token by itself.
        shared_saved_after: as `output_saved_after`, of the shared experts (a gate that multiplies them saves them).
        dense: the name, within a decoder layer, of the MLP that the layers without experts have.
    """

    output_saved_after: bool = True
    shared: tuple[str, ...] = ()
    shared_saved_after: bool = True
    dense: str | None = None


_ADDED = Family(output_saved_after=False, shared_saved_after=False, shared=("shared_experts",), dense="mlp")
_ALONE = Family(output_saved_after=False, dense="mlp")

FAMILIES: dict[str, Family] = {
    "deepseek_v2": _ADDED,
    "deepseek_v3": _ADDED,
    "ernie4_5_moe": _ADDED,
    "glm4_moe": _ADDED,
    "gpt_oss": _ALONE,
    "granitemoe": _ALONE,
    "mixtral": _ALONE,
    "olmoe": _ALONE,
    "qwen2_moe": Family(output_saved_after=False, shared=("shared_expert",), dense="mlp"),
    "qwen3_moe": _ALONE,
}


def family_of(model_type: str) -> Family:
    """The row of a model type; the safe defaults for one that has none."""
    return FAMILIES.get(model_type, Family())
