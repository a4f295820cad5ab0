"""Which experts a rank's tokens go to: at random, to one rank, and the profiles of arXiv 2609.14306."""

from __future__ import annotations

import re

import torch

__all__ = ["choose"]

_PROFILE = re.compile(r"profile (?:balanced|(\d+)%/(\d+))")


def choose(routing: str, tokens: int, experts: int, top_k: int, local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The experts and the routing weights of a rank's tokens, `[T, k]` each; random by torch's generator.

    Arguments:
        routing: one of

            - `"balanced"`: the k largest of random logits.
            - `"N% to rank 0"`: so for N% of the tokens, at random, among the first `local` experts.
            - `"profile balanced"`: token i's slot j goes to expert (i + j) mod E.
            - `"profile N%/h"`: the first N% of the tokens: slot j to expert j mod h. The others: slot j of token i to
              expert h + (i + j) mod (E - h).
        tokens, experts, top_k: T, E, k.
        local: experts of a rank.

    Raises:
        `ValueError`: another routing, or one that these experts are too few for.
    """
    logits = torch.randn(tokens, experts)
    skewed = re.fullmatch(r"(\d+)% to rank 0", routing)
    profile = _PROFILE.fullmatch(routing)
    if profile:
        index = _profile(tokens, experts, top_k, int(profile[1] or 0), int(profile[2] or 0))
        weights = torch.softmax(logits, -1).gather(1, index)
    elif skewed or routing == "balanced":
        if skewed:
            logits[torch.rand(tokens) < int(skewed[1]) / 100, :local] += 50
        weights, index = torch.softmax(logits, -1).topk(top_k)
    else:
        known = '"balanced", "N% to rank 0", "profile balanced" or "profile N%/h"'
        raise ValueError(f"routing={routing!r} is unknown; give {known}.")
    return index, (weights / weights.sum(-1, keepdim=True)).contiguous()


def _profile(tokens: int, experts: int, top_k: int, percent: int, hot: int) -> torch.Tensor:
    if hot >= experts:
        raise ValueError(f"a profile of {hot} hot experts needs more than {hot} experts, got {experts}.")
    token, slot = torch.arange(tokens)[:, None], torch.arange(top_k)
    cold = hot + (token + slot) % (experts - hot)
    if not hot:
        return cold
    return torch.where(token < tokens * percent // 100, slot % hot, cold)
