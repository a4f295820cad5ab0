"""A batch that the ranks of a group have in common, and the part of each: what is refused, and what is computed."""

from __future__ import annotations

from typing import Any

import torch
from ringmaster.shard import shard_batch

__all__ = ["PROBLEMS", "documents", "fingerprint", "part_of"]

# Told by number, so that ranks with other batches can say it too.
PROBLEMS = (
    "",
    "it has no input_ids [B, S]; inputs_embeds are not divided",
    "its {length} tokens are fewer than cp_size: give longer sequences, or a smaller cp_size",
    "its attention_mask is not [B, S] of zeros and ones, padding on the right; set padding_side to right",
    "its position_ids are not [B, S]",
    "its labels are not [B, S], one a token",
    "it has past_key_values, which hold whole sequences",
    "it has cu_seq_lens, the boundaries of packed documents, and no position_ids; give position_ids that restart",
    "it has no labels; give the model its labels, since each rank computes the loss of its own part of the sequence"
    " (the Trainer takes them away for compute_loss_func and label_smoothing_factor; VocabConfig(label_smoothing=...)"
    " does not)",
)
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "max_seqlen")
_NAMES = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")


def fingerprint(inputs: dict[str, Any], size: int) -> torch.Tensor:
    """
    What ranks compare of a batch: `[3]`, its problem by its place in `PROBLEMS` (0: none), its length, a checksum.

    Arguments:
        size: ranks that share a sequence.
    """
    ids = inputs.get("input_ids")
    anything = ids if torch.is_tensor(ids) else next(v for v in inputs.values() if torch.is_tensor(v))
    problem, length, checksum = _problem(inputs, size), 0, anything.new_zeros((), dtype=torch.int64)
    if torch.is_tensor(ids) and ids.dim() == 2:
        length = ids.shape[1]
        for number, name in enumerate(_NAMES, 1):
            if torch.is_tensor(value := inputs.get(name)):
                places = torch.arange(1, value.numel() + 1, device=ids.device)
                checksum += number * (value.reshape(-1).to(ids.device, torch.int64) * places + places).sum()
    return torch.stack([checksum.new_tensor(problem), checksum.new_tensor(length), checksum])


def _problem(inputs: dict[str, Any], size: int) -> int:
    ids, mask, positions = (inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if not torch.is_tensor(ids) or ids.dim() != 2 or inputs.get("inputs_embeds") is not None:
        return 1
    if ids.shape[1] < size:
        return 2
    if mask is not None:
        if not torch.is_tensor(mask) or mask.shape != ids.shape:
            return 3
        mask = mask.to(torch.int64)
        if ((mask != 0) & (mask != 1)).any() or (mask.diff(dim=1) > 0).any():
            return 3
    if positions is not None and (positions.dim() != 2 or positions.shape[1] != ids.shape[1]):
        return 4
    for name in ("labels", "shift_labels"):
        if inputs.get(name) is not None and inputs[name].shape != ids.shape:
            return 5
    if inputs.get("past_key_values") is not None:
        return 6
    if positions is None and any(inputs.get(name) is not None for name in _BOUNDARIES):
        return 7
    return 8 if inputs.get("labels") is None and inputs.get("shift_labels") is None else 0


def documents(position_ids: torch.Tensor, total: int) -> tuple[torch.Tensor, int] | None:
    """
    Where packed documents begin: as Transformers tells them, wherever a position does not follow the one before.

    Arguments:
        position_ids: `[B, S]`, of the whole sequence.
        total: S with the tokens added at the end, which belong to the last document.

    Returns:
        int32 boundaries over all rows, from 0 to `B * total`, and the longest document; `None` if each row is one.
    """
    rows, length = position_ids.shape
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=1) != 1
    if int(starts.sum()) == rows:
        return None
    row, place = starts.nonzero(as_tuple=True)
    ends = place.new_tensor([rows * total])
    boundaries = torch.cat([row * total + place, ends]).to(torch.int32)
    return boundaries, int(boundaries.diff().max())


def part_of(inputs: dict[str, Any], rank: int, size: int) -> tuple[dict[str, Any], tuple[torch.Tensor, int] | None]:
    """
    One rank's part of a batch that has no problem: of each tensor `[B, S, ...]` the tokens from rank * S/size on, S
    rounded up to a multiple of `size` with tokens that are masked and have no labels.

    Labels are shifted before they are divided, since the last token of a part predicts the first of the next.
    `num_items_in_batch`, where none is given, is the mean of the ranks' labels: so the mean over the ranks of a group
    of their losses is the mean over all its labels.

    Returns:
        The part's inputs, and the documents of the whole sequence, see `documents`.
    """
    inputs = {name: value for name, value in inputs.items() if name not in _BOUNDARIES}
    ids = inputs["input_ids"]
    rows, length = ids.shape
    packed = None
    if inputs.get("position_ids") is None:
        inputs["position_ids"] = torch.arange(length, device=ids.device).expand(rows, -1)
    else:
        inputs["position_ids"] = inputs["position_ids"].expand(rows, -1)
        if inputs.get("attention_mask") is None:  # Transformers looks for documents only then
            packed = documents(inputs["position_ids"], -(-length // size) * size)
    if inputs.get("attention_mask") is None:
        inputs["attention_mask"] = torch.ones_like(ids)  # for the tokens that are added, which routers do not count
    if inputs.get("shift_labels") is None:
        inputs.pop("shift_labels", None)
    elif inputs.get("labels") is None:
        inputs["labels"] = inputs["shift_labels"]  # a model computes a loss where it has labels
    inputs, _ = shard_batch(_counted(inputs, size), cp_rank=rank, cp_size=size, load_balance="contiguous")
    inputs["use_cache"] = False
    return inputs, packed


def _counted(inputs: dict[str, Any], size: int) -> dict[str, Any]:
    if inputs.get("num_items_in_batch") is not None:
        return inputs
    labels = inputs["labels"][:, 1:] if inputs.get("shift_labels") is None else inputs["shift_labels"]
    return {**inputs, "num_items_in_batch": (labels != -100).sum() / size}
