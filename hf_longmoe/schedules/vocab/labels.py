"""Which tokens count: labels validated, counted and selected, with one read of the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_longmoe.schedules.rehearsal import rehearsing

__all__ = ["ValidTokens", "read_counts", "select_valid"]


@dataclass(frozen=True)
class ValidTokens:
    """
    The tokens whose label is not ignored, in order.

    Arguments:
        labels: all labels [T].
        count: N, the number of valid tokens.
        index: their positions [N]; `None` if every token is valid, so that blocks are slices and nothing is gathered.
    """

    labels: torch.Tensor
    count: int
    index: torch.Tensor | None

    def where(self, start: int, stop: int) -> slice | torch.Tensor:
        """Positions of the valid tokens `start` to `stop` among all tokens: indexes [T] and [T, H] tensors alike."""
        return slice(start, stop) if self.index is None else self.index[start:stop]


def read_counts(labels: torch.Tensor, ignore_index: int, vocab_size: int) -> tuple[int, int | None]:
    """
    The number of valid labels, and one that is out of range (`None` if there is none), in one read of the device.

    The only place where a value of the data becomes a Python integer: a rehearsal gives it.
    """
    if (given := rehearsing()) is not None:
        return labels.numel() - given.ignored_labels, None
    valid = labels != ignore_index
    wrong = ((labels < 0) | (labels >= vocab_size)) & valid
    example = labels.take(wrong.to(torch.uint8).argmax())
    count, any_wrong, value = torch.stack([valid.sum(), wrong.any().long(), example.long()]).tolist()
    return count, value if any_wrong else None


def select_valid(labels: torch.Tensor, ignore_index: int, vocab_size: int) -> ValidTokens:
    """
    Arguments:
        labels: integers [T].

    Raises:
        `ValueError`: a label that is neither in [0, `vocab_size`) nor `ignore_index`.
    """
    if labels.numel() == 0:
        return ValidTokens(labels, 0, None)
    count, wrong = read_counts(labels, ignore_index, vocab_size)
    if wrong is not None:
        raise ValueError(
            f"labels contain {wrong}, outside the vocabulary [0, {vocab_size}); use ignore_index={ignore_index} "
            "to leave tokens out, or give the model as many embeddings as the tokenizer has entries."
        )
    if count == labels.numel():
        return ValidTokens(labels, count, None)
    return ValidTokens(labels, count, torch.nonzero_static(labels != ignore_index, size=count).flatten())
