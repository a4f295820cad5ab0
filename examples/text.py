"""
Documents, streamed with `datasets` from files here or from the Hub, and a tokenizer: what the examples train on.
Knows nothing of hf_longmoe.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from datasets import Dataset, IterableDataset, Value, concatenate_datasets, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = [
    "EXTENSIONS",
    "check_vocabulary",
    "read_dataset",
    "read_documents",
    "read_files",
    "standard_library",
    "text_files",
    "train_tokenizer",
]

EXTENSIONS = (".jsonl", ".md", ".py", ".rst", ".txt")
EOS = "</s>"


def read_documents(
    dataset: str | None = None, config_name: str | None = None, text_column: str | None = None
) -> IterableDataset:
    """
    Documents, in the same order each time, read as they are asked for.

    Arguments:
        dataset (`str`, *optional*): a folder (or one file) of text, see `text_files`; else a name for
            `datasets.load_dataset`, whose train split is streamed; `None` for the Python standard library's sources.
        config_name (`str`, *optional*): the dataset's configuration, as `load_dataset` takes it.
        text_column (`str`, *optional*): the column (of a dataset) or the key (of .jsonl lines) that holds the text.

    Returns:
        `datasets.IterableDataset` with one column, `text`.

    Raises:
        `ValueError`: nothing there, or nothing of text in it. Raised here, not at the first document.
    """
    if dataset is None:
        return read_files(standard_library())
    path = Path(dataset).expanduser()
    if path.exists():
        return read_files(text_files(path), text_column)
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


def read_files(paths: Iterable[Path], text_column: str | None = None) -> IterableDataset:
    """One document per file, then one per line of the .jsonl files, from their `text_column`; by `load_dataset`."""
    named = [(path.suffix.lower() == ".jsonl", glob.escape(str(path))) for path in paths]
    whole, lines = ([name for is_lines, name in named if is_lines is kind] for kind in (False, True))
    streams, options = [], {"split": "train", "streaming": True}
    if whole:
        stream = load_dataset("text", data_files=whole, sample_by="document", encoding_errors="replace", **options)
        streams.append(read_dataset(stream))
    if lines:
        try:
            streams.append(read_dataset(load_dataset("json", data_files=lines, **options), text_column))
        except ValueError as error:  # pyarrow's are such, of several lines; datasets has logged which file it was
            where = lines[0] if len(lines) == 1 else f"{lines[0]} and others"
            raise ValueError(
                f'{where}: no lines of {{"text": "..."}}, or of the key that --text_column names:'
                f" {' '.join(str(error).split())}"
            ) from error
    return concatenate_datasets(streams)


def read_dataset(dataset: Dataset | IterableDataset, text_column: str | None = None) -> IterableDataset:
    """
    One document per row; rows without text are left out.

    Raises:
        `ValueError`: no `text_column`; or none given, none named "text", and not exactly one of strings.
    """
    stream = dataset.to_iterable_dataset() if isinstance(dataset, Dataset) else dataset
    if stream.features is None:  # of many streams, until a row is read
        strings = [name for name, value in next(iter(stream), {}).items() if isinstance(value, str)]
    else:
        texts = (Value("string"), Value("large_string"))
        strings = [name for name, kind in stream.features.items() if kind in texts]
    if text_column is None and "text" in strings:
        text_column = "text"
    elif text_column is None and len(strings) == 1:
        text_column = strings[0]
    elif text_column not in strings:
        raise ValueError(
            f"text_column={text_column!r} does not say which column holds the text; "
            f"columns of text: {', '.join(strings) or 'none'}."
        )
    stream = stream.select_columns(text_column)
    if text_column != "text":
        stream = stream.rename_column(text_column, "text")
    return stream.filter(_has_text)


def _has_text(row: dict[str, str | None]) -> bool:
    return bool(row["text"])


def train_tokenizer(
    documents: Iterable[dict[str, str]], vocab_size: int = 32_000, max_bytes: int = 5_000_000
) -> PreTrainedTokenizerFast:
    """
    A byte-level BPE tokenizer with an EOS token. Takes seconds.

    Arguments:
        documents (`Iterable[dict[str, str]]`): rows with `text`, read until `max_bytes` of UTF-8; the last is cut.
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


def _first_bytes(documents: Iterable[dict[str, str]], max_bytes: int) -> Iterator[str]:
    for document in documents:
        data = document["text"].encode("utf-8", errors="replace")[:max_bytes]
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
