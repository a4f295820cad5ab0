"""A batch and its parts: together they are the batch, shifted before it was divided; and what cannot be divided."""

import pytest
import torch

from hf_longmoe.integrations.ringmaster.batch import PROBLEMS, documents, fingerprint, part_of

IDS = torch.arange(1, 15).reshape(2, 7)
LABELS = IDS.clone().index_fill_(1, torch.tensor([0, 3]), -100)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_parts_make_up_the_batch(size):
    mask = torch.ones_like(IDS)
    mask[1, 5:] = 0
    batch = {"input_ids": IDS, "labels": LABELS, "attention_mask": mask}
    parts = [part_of(batch, rank, size)[0] for rank in range(size)]
    whole = {
        name: torch.cat([part[name] for part in parts], dim=1)
        for name in ("input_ids", *parts[0])
        if name in ("input_ids", "shift_labels", "attention_mask", "position_ids")
    }
    assert len({part["input_ids"].shape for part in parts}) == 1
    total = -(-7 // size) * size
    assert torch.equal(whole["input_ids"][:, :7], IDS) and whole["input_ids"].shape == (2, total)
    assert torch.equal(whole["shift_labels"][:, :6], LABELS[:, 1:]) and (whole["shift_labels"][:, 6:] == -100).all()
    assert torch.equal(whole["attention_mask"][:, :7], mask) and not whole["attention_mask"][:, 7:].any()
    assert torch.equal(whole["position_ids"], torch.arange(total).expand(2, -1))
    assert all(part["num_items_in_batch"] == 10 / size and part["use_cache"] is False for part in parts)
    assert batch.keys() == {"input_ids", "labels", "attention_mask"}  # the caller's is left as it was


def test_what_is_given_is_kept():
    shifted = LABELS.roll(-1, 1)
    part, _ = part_of({"input_ids": IDS, "shift_labels": shifted, "num_items_in_batch": 5}, 1, 7)
    assert part["num_items_in_batch"] == 5 and torch.equal(part["shift_labels"], shifted[:, 1:2])
    assert part["labels"] is not None  # without them a model computes no loss


def test_documents_are_those_of_transformers():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [3, 4, 5, 6, 7, 8, 9]])
    boundaries, longest = documents(positions, 8)
    assert boundaries.tolist() == [0, 3, 5, 8, 16] and longest == 8
    assert boundaries.dtype == torch.int32
    assert documents(torch.arange(7).expand(2, -1), 8) is None
    batch = {"input_ids": IDS, "labels": LABELS, "position_ids": positions}
    assert part_of(batch, 0, 2)[1][0].tolist() == [0, 3, 5, 8, 16]
    assert part_of({**batch, "attention_mask": torch.ones_like(IDS)}, 0, 2)[1] is None  # as stock, with a mask


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": None}, "no input_ids"),
        ({"inputs_embeds": torch.zeros(2, 7, 4)}, "inputs_embeds are not divided"),
        ({"input_ids": IDS[:, :1], "labels": LABELS[:, :1]}, "fewer than cp_size"),
        ({"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1]] * 2)}, "padding on the right"),
        ({"attention_mask": torch.full((2, 7), 2)}, "zeros and ones"),
        ({"attention_mask": torch.ones(2, 1, 7, 7)}, "attention_mask is not"),
        ({"position_ids": torch.zeros(3, 2, 7)}, "position_ids are not"),
        ({"labels": LABELS[:, 1:]}, "labels are not"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"cu_seq_lens_q": torch.tensor([0, 7, 14])}, "cu_seq_lens"),
    ],
)
def test_what_cannot_be_divided(change, words):
    batch = {"input_ids": IDS, "labels": LABELS}
    assert fingerprint(batch, 2)[0] == 0
    assert words in PROBLEMS[fingerprint({**batch, **change}, 2)[0]]


def test_batches_that_differ_have_other_fingerprints():
    batch = {"input_ids": IDS, "labels": LABELS}
    found = [fingerprint(batch, 2)]
    found += [fingerprint({**batch, "input_ids": IDS.flip(1)}, 2), fingerprint({**batch, "labels": IDS}, 2)]
    found += [fingerprint({**batch, "position_ids": torch.zeros_like(IDS)}, 2)]
    assert len({tuple(one.tolist()) for one in found}) == 4
    assert torch.equal(found[0], fingerprint({**batch, "labels": LABELS.clone()}, 2))
