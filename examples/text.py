"""
Text to packed blocks of tokens: what the examples train on. Knows nothing of models, nor of hf_longmoe.

documents (strings, read lazily) -> tokenizer -> one stream, documents joined with EOS -> blocks of `seq_len` tokens.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from datasets import Dataset, IterableDataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = [
    "EXTENSIONS",
    "check_vocabulary",
    "pack",
    "read_dataset",
    "read_documents",
    "read_files",
    "standard_library",
    "text_files",
    "train_tokenizer",
]

EXTENSIONS = (".jsonl", ".md", ".py", ".rst", ".txt")
EOS = "</s>"
# A long document is encoded piece by piece, so that a block of 4,096 tokens does not cost a gigabyte of text.
PIECE = 1 << 20


def read_documents(
    dataset: str | None = None, config_name: str | None = None, text_column: str | None = None
) -> Iterator[str]:
    """
    Documents, in the same order each time, read as they are asked for.

    Arguments:
        dataset (`str`, *optional*): a folder (or one file) of text, see `text_files`; else a name for
            `datasets.load_dataset`, whose train split is streamed; `None` for the Python standard library's sources.
        config_name (`str`, *optional*): the dataset's configuration, as `load_dataset` takes it.
        text_column (`str`, *optional*): the column (of a dataset) or the key (of .jsonl lines) that holds the text.

    Raises:
        `ValueError`: nothing there, or nothing of text in it. Raised here, not at the first document.
    """
    if dataset is None:
        return read_files(standard_library())
    path = Path(dataset).expanduser()
    if path.exists():
        return read_files(text_files(path), text_column or "text")
    if path.is_absolute() or dataset.startswith((".", "~")) or dataset.endswith("/") or len(path.parts) > 2:
        raise ValueError(f"dataset={dataset!r}: there is no such folder; give a folder of text or a `datasets` name.")
    try:
        stream = load_dataset(dataset, config_name, split="train", streaming=True)
    except Exception as error:  # the hub, the network and the dataset's own builder each have errors of their own
        raise ValueError(
            f"dataset={dataset!r} is not a folder here, and `datasets` cannot load it: {' '.join(str(error).split())}"
        ) from error
    return read_dataset(stream, text_column)


def standard_library() -> list[Path]:
    """The sources of the running Python's standard library, without its tests: about 10 MB of real text, offline."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = _files(root, (".py",), skip={"idle_test", "site-packages", "dist-packages", "test", "tests"}.__contains__)
    if not paths:
        raise ValueError(f"{root} holds no Python sources; give --dataset, a folder of text or a `datasets` name.")
    return paths


def text_files(path: Path) -> list[Path]:
    """The non-empty files below `path` with one of `EXTENSIONS`, sorted; hidden ones are left out."""
    if path.is_file():
        found = [path] if path.suffix.lower() in EXTENSIONS else []
    else:
        found = _files(path, EXTENSIONS, skip=lambda name: name.startswith("."))
    found = [file for file in found if file.stat().st_size]
    if not found:
        raise ValueError(f"dataset={str(path)!r} holds no text; looked for non-empty {', '.join(EXTENSIONS)} files.")
    return found


def _files(root: Path, extensions: tuple[str, ...], skip: Callable[[str], bool]) -> list[Path]:
    """Sorted. Skipped folders are not entered: site-packages may hold a hundred times what is wanted."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not skip(name)]
        found += [Path(folder, name) for name in names if name.lower().endswith(extensions) and not skip(name)]
    return sorted(found)


def read_files(paths: Iterable[Path], text_key: str = "text") -> Iterator[str]:
    """One document per file; of a .jsonl file one per line, from its `text_key`."""
    for path in paths:
        if path.suffix.lower() != ".jsonl":
            yield path.read_text(encoding="utf-8", errors="replace")
            continue
        with open(path, encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text_of(line, text_key, f"{path}, line {number}")


def _text_of(line: str, text_key: str, where: str) -> str:
    try:
        text = json.loads(line)[text_key]
    except (json.JSONDecodeError, KeyError, TypeError, IndexError):
        text = None
    if not isinstance(text, str):
        raise ValueError(f'{where}: not an object with a string under {text_key!r}; write {{"{text_key}": "..."}}.')
    return text


def read_dataset(dataset: Dataset | IterableDataset, text_column: str | None = None) -> Iterator[str]:
    """
    One document per row.

    Raises:
        `ValueError`: no `text_column`; or none given, none named "text", and not exactly one of strings.
    """
    # From a row and not from `features`, which a stream often lacks.
    strings = [name for name, value in next(iter(dataset), {}).items() if isinstance(value, str)]
    if text_column is None and "text" in strings:
        text_column = "text"
    elif text_column is None and len(strings) == 1:
        text_column = strings[0]
    elif text_column not in strings:
        raise ValueError(
            f"text_column={text_column!r} does not say which column holds the text; "
            f"columns of text: {', '.join(strings) or 'none'}."
        )
    return (row[text_column] for row in dataset if row[text_column])


def train_tokenizer(
    documents: Iterable[str], vocab_size: int = 32_000, max_bytes: int = 5_000_000
) -> PreTrainedTokenizerFast:
    """
    A byte-level BPE tokenizer with an EOS token. Takes seconds.

    Arguments:
        documents (`Iterable[str]`): read until `max_bytes` of UTF-8; the last one is cut.
        vocab_size (`int`, defaults to 32,000): the most tokens; little text gives fewer.
        max_bytes (`int`, defaults to 5,000,000): what is trained on, at most.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_first_bytes(documents, max_bytes), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


def _first_bytes(documents: Iterable[str], max_bytes: int) -> Iterator[str]:
    for document in documents:
        data = document.encode("utf-8", errors="replace")[:max_bytes]
        yield data.decode("utf-8", errors="ignore")
        max_bytes -= len(data)
        if max_bytes <= 0:
            return


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """
    A model may hold more rows than the tokenizer has tokens (they are often padded), not fewer.

    Raises:
        `ValueError`: the tokenizer can give ids that the model has no row for.
    """
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer):,} tokens but the model's vocabulary holds {vocab_size:,}; "
            "use the model's own tokenizer, or call model.resize_token_embeddings first."
        )


def pack(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, seq_len: int, steps: int, batch_size: int
) -> Dataset:
    """
    The first `steps * batch_size` blocks of the stream of tokens; no more text than they need is read or encoded.

    Arguments:
        documents (`Iterable[str]`): joined with the tokenizer's EOS, and cut wherever a block ends.
        tokenizer (`PreTrainedTokenizerBase`): encodes without adding special tokens.
        seq_len (`int`): tokens in a block.
        steps (`int`): optimizer steps.
        batch_size (`int`): blocks in one step, over all processes.

    Returns:
        `datasets.Dataset` with `input_ids` and `labels`, each `[steps * batch_size, seq_len]` and equal: a causal LM
        shifts its labels itself.

    Raises:
        `ValueError`: too little text; says how many tokens there are, and what would work.
    """
    needed = steps * batch_size * seq_len
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens: list[int] = []
    for piece in chain.from_iterable((*_pieces(document), None) for document in documents):
        if piece is None:
            tokens += end
        else:
            tokens += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        if len(tokens) >= needed:
            break
    if len(tokens) < needed:
        fits = {"--steps": len(tokens) // (batch_size * seq_len), "--seq_len": len(tokens) // (steps * batch_size)}
        words = " or ".join(f"{flag} {number}" for flag, number in fits.items() if number)
        raise ValueError(
            f"{len(tokens):,} tokens of text, but {steps} steps x {batch_size} sequences x {seq_len:,} tokens "
            f"need {needed:,}; {f'{words} would fit' if words else 'add text'}."
        )
    blocks = [tokens[start : start + seq_len] for start in range(0, needed, seq_len)]
    return Dataset.from_dict({"input_ids": blocks, "labels": blocks})


def _pieces(document: str) -> Iterator[str]:
    return (document[start : start + PIECE] for start in range(0, len(document), PIECE))
