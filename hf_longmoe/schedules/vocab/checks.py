"""What the public functions refuse, in the same words. Shapes and numbers only: nothing here reads a device."""

from __future__ import annotations

import torch

__all__ = ["check_num_items", "check_objective", "check_vocab_size", "flatten_low_rank", "flatten_tokens"]


def flatten_tokens(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Size]:
    """Hidden states `[T, H]`, labels `[T]` and the shape that the labels had; refuses what does not fit."""
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit; give [..., H] and [V, H]."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}; give [V].")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels {tuple(labels.shape)} do not fit hidden {tuple(hidden.shape)}; give one label a token."
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels have dtype {labels.dtype}; give integers, class probabilities are not supported.")
    labels = labels.detach().to(hidden.device)
    return hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), labels.shape


def flatten_low_rank(
    hidden: torch.Tensor, weight: torch.Tensor, u: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """u `[T, r]` and v; refuses what does not fit hidden states `[T, H]` and weight `[V, H]`."""
    flat = u.reshape(-1, u.shape[-1])
    if v.dim() != 2 or (flat.shape[0], v.shape[0], v.shape[1]) != (hidden.shape[0], weight.shape[0], flat.shape[1]):
        raise ValueError(
            f"low_rank {tuple(u.shape)} and {tuple(v.shape)} do not fit {hidden.shape[0]} tokens and a vocabulary of"
            f" {weight.shape[0]}; give [..., r] and [V, r]."
        )
    return flat, v


def check_objective(label_smoothing: float, z_loss: float) -> None:
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing!r} must be in [0, 1].")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"z_loss={z_loss!r} must be non-negative and finite.")


def check_num_items(num_items: int | float | torch.Tensor | None) -> None:
    """Refuses what a sum cannot be divided by; zero only where it will be known that there are tokens."""
    if isinstance(num_items, torch.Tensor):
        if num_items.numel() != 1:
            raise ValueError(
                f"num_items has shape {tuple(num_items.shape)}; give a number or a tensor of one element."
            )
    elif num_items is not None and not 0 <= num_items < float("inf"):
        raise ValueError(f"num_items={num_items!r} must be a positive number: the tokens that the sum is divided by.")


def check_vocab_size(vocab_size: int | None, weight: torch.Tensor) -> int:
    """How many of the weight's entries, `[V, H]`, take part; all if not given."""
    if vocab_size is None:
        return weight.shape[0]
    if not 0 < vocab_size <= weight.shape[0]:
        raise ValueError(f"vocab_size={vocab_size} must be in [1, {weight.shape[0]}], the entries of the weight.")
    return vocab_size
