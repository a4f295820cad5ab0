"""Whether a module treats each token by itself, and the same way each time: what tiles, and a second run, take."""

from __future__ import annotations

from torch import nn

__all__ = ["is_adapter", "why_not_by_token"]


def is_adapter(module: nn.Module) -> bool:
    """Whether it is one of PEFT's that adds to what it wraps, and not a choice between copies (`modules_to_save`)."""
    kind = type(module)
    return hasattr(kind, "adapter_layer_names") and kind.__module__.startswith("peft.tuners.")


def why_not_by_token(module: nn.Module, now: bool = False) -> str | None:
    """
    Why running it a second time, or on some of its tokens, would give something else; `None` if it would not.

    Arguments:
        now: in the mode that it is in; else in training.
    """
    for part in module.modules():
        if isinstance(part, nn.Dropout) and part.p > 0 and (part.training or not now):
            return "it has dropout, which a second run in backward would draw anew"
        if is_adapter(part):
            kind = type(part)
            variants = {type(variant).__name__ for variant in getattr(part, "lora_variant", {}).values()}
            plain = (kind.__module__, kind.__name__) == ("peft.tuners.lora.layer", "Linear")
            if not plain or not all(name.startswith("Dora") for name in variants):
                tuner = ", ".join((f"{kind.__module__.split('.')[2]}.{kind.__name__}", *sorted(variants)))
                return f"an adapter is in it ({tuner}) that may draw at random or look at other tokens; use plain LoRA"
            if part._forward_pre_hooks:  # for `adapter_names`
                return "each sequence of the batch has an adapter of its own"
    return None
