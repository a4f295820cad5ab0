"""
Documents to blocks of tokens: packed without loss, each document by itself, endless, and resumed at its place.
Knows nothing of hf_longmoe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from datasets import IterableDataset
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

__all__ = ["PackedStream", "StreamPosition", "pack"]

# Characters of a long document that are encoded at once, and documents or pieces: so that a block of 4,096 tokens does
# not cost a gigabyte of text.
PIECE, TOGETHER = 1 << 20, 8
# Places that are remembered: blocks that are read ahead of the step that is saved, over all processes.
REMEMBERED = 4096
BEGINNING: dict[str, Any] = {"blocks": 0, "tokens": None, "used": 0}


def pack(documents: IterableDataset, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> PackedStream:
    """
    An endless stream of blocks: documents, each ended by the tokenizer's EOS, one after the other and again from the
    start; cut wherever a block ends. No more text is read than the next blocks need.

    Arguments:
        documents (`datasets.IterableDataset`): rows with `text`, as `read_documents` gives them.
        tokenizer (`PreTrainedTokenizerBase`): encodes without adding special tokens.
        seq_len (`int`): tokens in a block.

    Raises:
        `ValueError`: there is no text.
    """
    if next(iter(documents), None) is None:
        raise ValueError("No document has any text; give --dataset one that has.")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def cut(rows: dict[str, list[str]]) -> dict[str, list]:
        (text,) = rows["text"]
        pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
        return {"text": pieces, "ends": [False] * (len(pieces) - 1) + [True]}

    def encode(rows: dict[str, list]) -> dict[str, list]:
        ids = tokenizer(rows["text"], add_special_tokens=False, verbose=False)["input_ids"]
        return {"input_ids": [[*row, *(end if ends else [])] for row, ends in zip(ids, rows["ends"], strict=True)]}

    pieces = documents.map(cut, batched=True, batch_size=1)
    tokens = pieces.map(encode, batched=True, batch_size=TOGETHER, remove_columns="text")
    return PackedStream(tokens.repeat(None), seq_len)


class PackedStream(torch.utils.data.IterableDataset):
    """
    Blocks of exactly `seq_len` tokens for a Trainer: `input_ids`, `labels` and `position_ids`, each `[seq_len]`.

    Each document of a block is by itself: `position_ids` restart at it, so that no token attends to another document,
    and its first token is no other's label. Where a block ends in a document, the rest of it begins the next block.

    Every process sees the same stream, and Accelerate gives each its own blocks, so that a step's samples are the same
    on any number of processes. A Trainer that resumes reads a stream from its start and throws away what was trained
    on: with `StreamPosition` that costs next to nothing, else it is exact as well. Not for DataLoader workers.

    Arguments:
        tokens (`datasets.IterableDataset`): rows `input_ids`, and `ends`, whether the document ends with the row.
        seq_len (`int`): tokens in a block.
    """

    def __init__(self, tokens: IterableDataset, seq_len: int):
        self._tokens, self._seq_len = tokens, seq_len
        self._flatten = DataCollatorWithFlattening(return_tensors="np")
        self._places: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)
        self._start = self._next = BEGINNING  # of this iteration, and of the next one
        self._thrown_away = 0

    def state_dict(self, blocks: int | None = None) -> dict[str, Any]:
        """
        The place after so many blocks since the start of the stream; by default after those that have been read.

        Returns:
            `{"blocks": n, "tokens": the place of the tokens before a row, "used": tokens of the row that are used}`.

        Raises:
            `ValueError`: so many have not been read, or too many since.
        """
        places = [self._start, *self._places]
        found = next((place for place in reversed(places) if blocks in (None, place["blocks"])), None)
        if found is None:
            known = f"{places[0]['blocks']}, or {places[1]['blocks']} to" if places[1:] else ""
            raise ValueError(f"blocks={blocks}: the places known are after {known} {places[-1]['blocks']} blocks.")
        return found

    def load_state_dict(self, state: dict[str, Any], thrown_away: int = 0) -> None:
        """
        Has the next iteration, and no later one, begin at this place.

        Arguments:
            thrown_away: blocks of one token to yield first, for a Trainer that will not look at them.
        """
        self._start, self._next, self._thrown_away = state, state, thrown_away
        self._places.clear()

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        self._places.clear()
        self._start, self._next = self._next, BEGINNING
        thrown_away, self._thrown_away = self._thrown_away, 0
        for _ in range(thrown_away):
            yield self._block([[0]])
        count, before, used = (self._start[name] for name in ("blocks", "tokens", "used"))
        self._tokens.load_state_dict(before)
        documents, room, goes_on = [], self._seq_len, False
        for row in self._tokens:
            ids = row["input_ids"]
            while used < len(ids):
                part = ids[used : used + room]
                documents = [*documents[:-1], documents[-1] + part] if goes_on else [*documents, part]
                used, room, goes_on = used + len(part), room - len(part), True
                if not room:
                    count += 1
                    self._places.append({"blocks": count, "tokens": before, "used": used})
                    yield self._block(documents)
                    documents, room, goes_on = [], self._seq_len, False
            goes_on = goes_on and not row["ends"]
            before, used = self._tokens.state_dict(), 0

    def _block(self, documents: list[list[int]]) -> dict[str, list[int]]:
        flat = self._flatten([{"input_ids": ids} for ids in documents])
        return {name: flat[name][0].tolist() for name in ("input_ids", "labels", "position_ids")}


class StreamPosition(TrainerCallback, ExportableState):
    """
    Saves a stream's place with each checkpoint, in `trainer_state.json`, and puts the stream there when a run resumes:
    the Trainer then skips empty blocks instead of text. Checkpoints without a place are resumed by reading.

    Arguments:
        stream (`PackedStream`): what the Trainer trains on.
        blocks_per_step (`int`): blocks in one optimizer step, over all processes.
    """

    def __init__(self, stream: PackedStream, blocks_per_step: int):
        self.stream, self.blocks_per_step, self._steps, self._before = stream, blocks_per_step, 0, 0

    def state(self) -> dict[str, Any]:
        try:
            place = self.stream.state_dict(self._steps * self.blocks_per_step)
        except ValueError:  # not known on this process
            place = None
        return {"args": {}, "attributes": {"place": place}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        self._before = state.global_step if args.ignore_data_skip else 0  # steps whose blocks are not skipped
        self._steps = state.global_step - self._before
        saved = state.stateful_callbacks.get(type(self).__name__) if self._steps else None
        if saved and (place := saved["attributes"]["place"]):
            self.stream.load_state_dict(place, thrown_away=place["blocks"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        self._steps = state.global_step - self._before
