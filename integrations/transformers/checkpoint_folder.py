"""A checkpoint's folder on disk: written aside, published by one rename, rotated. Nothing of what is inside it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

__all__ = ["aside", "begin", "clean", "publish", "recover", "rotate", "sync"]

# Hidden, so that neither `get_last_checkpoint` nor `sort_checkpoints` ever takes one for a checkpoint.
_ASIDE = {
    kind: re.compile(rf"^\.{kind}-({PREFIX_CHECKPOINT_DIR}-\d+)$") for kind in ("saving", "replaced", "deleting")
}


def begin(checkpoint: Path) -> Path:
    """
    A new folder beside `checkpoint` to write into, after `recover` and `clean`. For one process.

    Raises:
        `OSError`: it cannot be made.
    """
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    recover(checkpoint.parent)
    clean(checkpoint.parent)
    folder = aside(checkpoint)
    folder.mkdir()
    return folder


def publish(folder: Path, checkpoint: Path) -> None:
    """
    Renames a folder that is complete, and synced file by file, to `checkpoint`. For one process.

    An older folder of that name is moved away first and deleted last: a process that dies in between leaves it to
    `recover`.
    """
    for inside, _, _ in os.walk(folder):
        sync(Path(inside))
    replaced = aside(checkpoint, "replaced")
    if checkpoint.exists():
        checkpoint.rename(replaced)
    folder.rename(checkpoint)
    sync(checkpoint.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(run: Path) -> None:
    """Puts back what a process that died in `publish` had moved away. For one process; cheap where there is none."""
    for path, name in _found(run, "replaced"):
        if (run / name).exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(run / name)


def clean(run: Path) -> None:
    """Deletes what saves that did not end have left in this run's folder. For one process."""
    for kind in ("saving", "deleting"):
        for path, _ in _found(run, kind):
            shutil.rmtree(path, ignore_errors=True)


def rotate(run: Path, limit: int | None, newest: Path, best: str | None) -> None:
    """
    Deletes the oldest checkpoints until `limit` are left; never the newest or the best. For one process.

    Arguments:
        run: the folder that the checkpoints are in.
        limit: `TrainingArguments.save_total_limit`; all are kept if it is None or not above 0.
        newest: the one just written, whatever its number.
        best: `TrainerState.best_model_checkpoint`.
    """
    if limit is None or limit <= 0:
        return
    found = [Path(path) for path in sort_checkpoints(str(run), use_mtime=True)]
    kept = {newest, *([] if best is None else [Path(best)])}
    surplus = len(found) - max(limit, len(kept & set(found)))
    for path in [path for path in found if path not in kept][: max(surplus, 0)]:
        # Renamed first: a folder that is half deleted must not be taken for a checkpoint.
        path.rename(folder := aside(path, "deleting"))
        shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Has the file, or the folder's list of names, on the disk before it returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def aside(checkpoint: Path, kind: str = "saving") -> Path:
    """Where `checkpoint` is written until it is complete."""
    return checkpoint.with_name(f".{kind}-{checkpoint.name}")


def _found(run: Path, kind: str) -> list[tuple[Path, str]]:
    if not run.is_dir():
        return []
    matches = [(path, _ASIDE[kind].match(path.name)) for path in run.iterdir()]
    return [(path, match[1]) for path, match in matches if match]
