"""examples/text.py: documents and tokenizer are right; bad input is a one-line error that says what works."""

import importlib.util
import json
from itertools import islice
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset
from transformers import AutoTokenizer

spec = importlib.util.spec_from_file_location("text", Path(__file__).parents[2] / "examples" / "text.py")
text = importlib.util.module_from_spec(spec)
spec.loader.exec_module(text)


@pytest.fixture(scope="module")
def tokenizer():
    return text.train_tokenizer(islice(text.read_documents(), 20), vocab_size=400, max_bytes=50_000)


def texts(documents):
    return [row["text"] for row in documents]


def one_line_error(call, *parts):
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_standard_library_is_the_default_and_leaves_tests_and_packages_out():
    paths = text.standard_library()
    assert paths == sorted(paths) and Path(json.__file__) in paths
    assert not {"test", "tests", "site-packages"} & {part for path in paths for part in path.parts}
    assert next(iter(text.read_documents()))["text"] == paths[0].read_text(encoding="utf-8")


def test_standard_library_without_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    one_line_error(text.read_documents, str(tmp_path), "--dataset")


def test_folder_is_read_in_order_and_by_extension(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "first.md").write_text("first")
    (tmp_path / "c.jsonl").write_text('{"text": "third"}\n\n{"text": "fourth"}\n')
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "note.txt").write_text("hidden")
    (tmp_path / "a" / "z[1]*.rst").write_bytes(b"named \xff oddly")
    found = text.read_documents(str(tmp_path))
    assert isinstance(found, IterableDataset) and texts(found) == [
        "first",
        "named \ufffd oddly",
        "second",
        "third",
        "fourth",
    ]
    assert texts(text.read_documents(str(tmp_path / "b.txt"))) == ["second"]
    (tmp_path / "c.jsonl").write_text('{"body": "third", "id": "3"}\n{"body": "", "id": "4"}')
    assert texts(text.read_documents(str(tmp_path / "c.jsonl"), text_column="body")) == ["third"]


@pytest.mark.parametrize("line", ['{"body": 1}', '{"text": 3}', "[]", "3", "not json"])
def test_jsonl_without_text_names_the_file_and_the_column(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(line)
    one_line_error(lambda: text.read_documents(str(tmp_path)), "a.jsonl", "text", "--text_column")


def test_folder_with_no_text_says_what_was_looked_for(tmp_path):
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "empty.txt").touch()
    one_line_error(lambda: text.read_documents(str(tmp_path)), str(tmp_path), *text.EXTENSIONS)
    one_line_error(lambda: text.read_documents(str(tmp_path / "image.png")), "image.png", *text.EXTENSIONS)


@pytest.mark.parametrize("name", ["./nowhere", "~/nowhere-at-all", "/nowhere/at/all", "nowhere/", "a/b/c"])
def test_missing_folder(name):
    one_line_error(lambda: text.read_documents(name), repr(name), "no such folder")


def test_name_that_datasets_cannot_load(monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach\nthe Hub")

    monkeypatch.setattr(text, "load_dataset", offline)
    one_line_error(lambda: text.read_documents("someone/something"), "'someone/something'", "Couldn't reach the Hub")


def test_datasets_name_is_streamed_with_its_configuration(monkeypatch):
    def load(*args, **kwargs):
        assert args == ("wikitext", "small") and kwargs == {"split": "train", "streaming": True}
        return Dataset.from_dict({"title": ["x"], "text": ["a document"]})

    monkeypatch.setattr(text, "load_dataset", load)
    assert texts(text.read_documents("wikitext", "small")) == ["a document"]


def test_text_column_is_found_or_asked_for():
    rows = {"id": [1, 2, 3], "body": ["one", "", "two"]}
    assert texts(text.read_dataset(Dataset.from_dict(rows))) == ["one", "two"]
    stream = IterableDataset.from_generator(lambda: iter([{"id": 1, "body": "one"}]))
    assert stream.features is None and texts(text.read_dataset(stream)) == ["one"]
    both = Dataset.from_dict({**rows, "title": ["a", "b", "c"]})
    assert texts(text.read_dataset(both, "title")) == ["a", "b", "c"]
    one_line_error(lambda: text.read_dataset(both), "text_column=None", "body, title")
    one_line_error(lambda: text.read_dataset(both, "content"), "text_column='content'", "body, title")
    one_line_error(lambda: text.read_dataset(Dataset.from_dict({"id": [1]})), "none")


def test_tokenizer_gives_back_the_text_and_survives_saving(tokenizer, tmp_path):
    assert len(tokenizer) == 400 and tokenizer.eos_token_id is not None
    for sample in ("def f(x):\n    return x", "naïve €\t\x00 日本"):
        assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("import os")["input_ids"] == tokenizer("import os")["input_ids"]
    assert again.eos_token_id == tokenizer.eos_token_id


def test_tokenizer_reads_no_more_than_max_bytes():
    read = []

    def documents():
        for _ in range(10):
            read.append(1)
            yield {"text": "é" * 300}  # 600 bytes

    text.train_tokenizer(documents(), vocab_size=300, max_bytes=1001)
    assert len(read) == 2


def test_vocabulary_mismatch_gives_both_sizes(tokenizer):
    text.check_vocabulary(tokenizer, 400)
    text.check_vocabulary(tokenizer, 512)
    one_line_error(lambda: text.check_vocabulary(tokenizer, 399), "400 tokens", "399", "resize_token_embeddings")
