"""examples/packing.py: blocks are the text without loss, documents apart; a resumed run goes on at its place."""

import importlib
import json
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from datasets import IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, TrainingArguments

from hf_longmoe import LongMoETrainer

EOS = 0


@pytest.fixture
def packing(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.delitem(sys.modules, "packing", raising=False)
    yield importlib.import_module("packing")
    sys.modules.pop("packing", None)


class Letters:
    """A tokenizer of one token a character, that counts what it has encoded."""

    eos_token_id, encoded = EOS, 0

    def __call__(self, texts, **kwargs):
        self.encoded += sum(map(len, texts))
        return {"input_ids": [[ord(letter) - 96 for letter in text] for text in texts]}


def documents(*texts):
    return IterableDataset.from_generator(_rows, gen_kwargs={"texts": list(texts)})


def _rows(texts):
    yield from ({"text": text} for text in texts)


def numbers(text):
    return [ord(letter) - 96 if letter != "|" else EOS for letter in text]


def test_blocks_are_the_text_again_and_again_with_documents_apart(packing):
    stream = packing.pack(documents("abcde", "f", "ghi"), Letters(), seq_len=4)
    blocks = list(islice(stream, 6))
    assert [block["input_ids"] for block in blocks] == [
        *map(numbers, ("abcd", "e|f|", "ghi|")),
        *map(numbers, ("abcd", "e|f|", "ghi|")),
    ]
    assert [block["position_ids"] for block in blocks[:3]] == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]]
    assert blocks[1]["labels"] == [-100, EOS, -100, EOS] and blocks[2]["labels"] == [-100, *numbers("hi|")]
    again = [block["input_ids"] for block in islice(stream, 2)]
    assert again == [*map(numbers, ("abcd", "e|f|"))], "a new iteration starts anew"


def test_long_documents_are_encoded_piece_by_piece_and_stay_one_document(packing, monkeypatch):
    monkeypatch.setattr(packing, "PIECE", 3)
    tokenizer = Letters()
    stream = packing.pack(documents("abcdefgh" * 1000, "xyz"), tokenizer, seq_len=16)
    block = next(iter(stream))
    assert block["input_ids"] == numbers("abcdefgh" * 2) and block["position_ids"] == [*range(16)]
    assert tokenizer.encoded <= 3 * packing.TOGETHER, "more text than a block needs"
    whole = [next(iter(packing.pack(documents("abcdefgh", "xyz"), tokenizer, seq_len=13)))[name] for name in block]
    assert whole == [
        numbers("abcdefgh|xyz|"),
        [-100, *numbers("bcdefgh|"), -100, *numbers("yz|")],
        [*range(9), *range(4)],
    ]


def test_a_place_is_that_of_the_next_block_and_survives_json(packing):
    tokenizer = Letters()
    texts = ["abc" * 7, "d", "efgh" * 3, "ij", "k" * 40, "lm"] * 5
    stream = packing.pack(documents(*texts), tokenizer, seq_len=11)
    blocks = list(islice(stream, 60))  # more than twice through
    places = [json.loads(json.dumps(stream.state_dict(count))) for count in range(61)]
    assert stream.state_dict() == places[60]
    for count in (0, 1, 7, 30, 59, 60):
        other = packing.pack(documents(*texts), tokenizer, seq_len=11)
        other.load_state_dict(places[count])
        tokenizer.encoded = 0
        assert list(islice(other, 60 - count)) == blocks[count:60]
        if count == 59:
            assert tokenizer.encoded < sum(map(len, texts)), "it has read up to the place"
        assert other.state_dict()["blocks"] == 60
    other.load_state_dict(places[7], thrown_away=2)
    first, second = (list(islice(other, count)) for count in (3, 1))
    assert [len(block["input_ids"]) for block in first] == [1, 1, 11] and first[2] == blocks[7]
    assert second == blocks[:1] and other.state_dict()["blocks"] == 1, "a second training would begin there again"
    with pytest.raises(ValueError, match=r"blocks=99: .* 59 to 60"):
        other.load_state_dict(places[58])
        list(islice(other, 2))
        other.state_dict(99)


def test_no_text(packing):
    with pytest.raises(ValueError, match="--dataset"):
        packing.pack(documents(), Letters(), 4)


class Losses(TrainerCallback):
    def __init__(self):
        self.found = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.found[state.global_step] = logs["loss"]


def run(packing, folder, place=True, resume=None):
    tokenizer, texts = Letters(), [letter * (5 + ord(letter) % 7) for letter in "abcdefghijklmnop"]
    stream = packing.pack(documents(*texts), tokenizer, seq_len=8)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=27,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.2,  # so that the random numbers have to be right
    )
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
    )
    losses = Losses()
    callbacks = [losses, *([packing.StreamPosition(stream, blocks_per_step=4)] if place else [])]
    model = AutoModelForCausalLM.from_config(config)
    trainer = LongMoETrainer(model=model, args=args, train_dataset=stream, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return losses.found, tokenizer.encoded


def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped_and_reads_no_text_again(packing, tmp_path):
    whole, _ = run(packing, tmp_path)
    assert len(whole) == 6 and len(set(whole.values())) == 6
    checkpoint = tmp_path / "checkpoint-3"
    kept = json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"]
    assert kept["StreamPosition"]["attributes"]["place"]["blocks"] == 12
    read, reread = run(packing, tmp_path / "read", place=False, resume=str(checkpoint))  # as the Trainer does itself
    placed, encoded = run(packing, tmp_path / "placed", resume=str(checkpoint))
    for resumed in (read, placed):
        assert resumed == {step: whole[step] for step in (4, 5, 6)}
    assert encoded < reread, "it has read the text before the place again"
