"""A checkpoint's folder: whole or not there, at whatever point the process that writes it dies."""

import os
import shutil

import pytest
from transformers.trainer_utils import get_last_checkpoint

from hf_longmoe.integrations.transformers import checkpoint_folder


def write(checkpoint, text):
    folder = checkpoint_folder.begin(checkpoint)
    (folder / "model").write_text(text)
    checkpoint_folder.publish(folder, checkpoint)


def test_published(tmp_path):
    folder = checkpoint_folder.begin(tmp_path / "run" / "checkpoint-3")
    assert folder == checkpoint_folder.aside(tmp_path / "run" / "checkpoint-3")
    assert get_last_checkpoint(tmp_path / "run") is None
    checkpoint_folder.publish(folder, tmp_path / "run" / "checkpoint-3")
    assert os.listdir(tmp_path / "run") == ["checkpoint-3"]


class Died(BaseException):
    pass


@pytest.mark.parametrize("dies_at", range(20))
def test_dies_at_any_call(tmp_path, monkeypatch, dies_at):
    """While checkpoint-3 is written over: afterwards it is the old one or the new one, and the next save works."""
    write(tmp_path / "checkpoint-3", "old")
    calls = 0

    def dying(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > dies_at:
                raise Died
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        for name in ("mkdir", "rename", "fsync", "unlink", "rmdir"):
            patched.setattr(os, name, dying(getattr(os, name)))
        try:
            write(tmp_path / "checkpoint-3", "new")
            assert dies_at >= 6
        except Died:
            assert calls == dies_at + 1
    checkpoint_folder.recover(tmp_path)
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")
    assert (tmp_path / "checkpoint-3" / "model").read_text() in ("old", "new")
    write(tmp_path / "checkpoint-3", "newer")
    assert os.listdir(tmp_path) == ["checkpoint-3"]
    assert (tmp_path / "checkpoint-3" / "model").read_text() == "newer"


def test_another_run_is_left_alone(tmp_path):
    other = checkpoint_folder.begin(tmp_path / "other" / "checkpoint-1")
    mine = [".saving-checkpoint-x", "notes", "checkpoint-best"]
    for name in mine:
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / ".saving-checkpoint-9").mkdir()
    (tmp_path / "run" / ".deleting-checkpoint-9").mkdir()
    write(tmp_path / "run" / "checkpoint-1", "mine")
    assert other.is_dir() and sorted(os.listdir(tmp_path / "run")) == sorted([*mine, "checkpoint-1"])


@pytest.mark.parametrize(
    "limit, best, left",
    [
        (None, None, [1, 2, 3, 10]),
        (0, None, [1, 2, 3, 10]),
        (2, None, [3, 10]),
        (2, 1, [1, 10]),
        (1, 1, [1, 10]),
        (1, None, [10]),
        (9, None, [1, 2, 3, 10]),
    ],
)
def test_rotated(tmp_path, limit, best, left):
    for number in (1, 2, 3, 10):
        write(tmp_path / f"checkpoint-{number}", "")
        os.utime(tmp_path / f"checkpoint-{number}", (100 * number, 100 * number))
    newest = tmp_path / "checkpoint-10"
    checkpoint_folder.rotate(tmp_path, limit, newest, None if best is None else str(tmp_path / f"checkpoint-{best}"))
    assert sorted(int(name.split("-")[1]) for name in os.listdir(tmp_path)) == left


def test_the_newest_stays_whatever_its_number(tmp_path):
    """After a resume from an earlier one, higher numbers are older."""
    for number, time in ((5, 100), (6, 200), (2, 300)):
        write(tmp_path / f"checkpoint-{number}", "")
        os.utime(tmp_path / f"checkpoint-{number}", (time, time))
    checkpoint_folder.rotate(tmp_path, 1, tmp_path / "checkpoint-2", None)
    assert os.listdir(tmp_path) == ["checkpoint-2"]


def test_half_deleted_is_no_checkpoint(tmp_path, monkeypatch):
    for number in (1, 2):
        write(tmp_path / f"checkpoint-{number}", "")
        os.utime(tmp_path / f"checkpoint-{number}", (100 * number, 100 * number))
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # the process dies before
    checkpoint_folder.rotate(tmp_path, 1, tmp_path / "checkpoint-2", None)
    assert sorted(os.listdir(tmp_path)) == [".deleting-checkpoint-1", "checkpoint-2"]
