"""A rank that fails ends the others with its message, wherever it was: in the model, the Trainer, or between them."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator

from torch import distributed

from hf_longmoe.integrations.transformers.checkpointing import CheckpointError
from hf_longmoe.schedules.wire import PeerError

__all__ = ["end_together"]

_LOOK_EVERY = 0.5  # seconds between two looks for a message of another rank
# What gloo and NCCL say where another process has gone.
_LOST = re.compile(r"connection (closed|reset|refused|was)|broken pipe|remote process|socket|timed out", re.I)


@contextlib.contextmanager
def end_together(grace: float = 10.0) -> Iterator[None]:
    """
    An exception inside is told to the other ranks, which then raise a `PeerError` with its message.

    A rank that waits for one that failed learns of it when its connection breaks, which on an accelerator may be
    never: the process is ended then, with the message, `grace` seconds after it was told. A rank that was killed tells
    nothing; the others say so. Where there is one rank alone, nothing is done.

    Arguments:
        grace (`float`, defaults to 10): seconds for a rank to come to an end by itself.

    Raises:
        `PeerError`: another rank has failed.
    """
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        yield
        return
    told = _Told(grace)
    try:
        yield
    except (CheckpointError, PeerError, SystemExit):  # all ranks raise it, or the rank that failed tells it itself
        raise
    except BaseException as error:
        lost = _LOST.search(str(error)) is not None
        text = f"{type(error).__name__}: {error}"
        if lost:
            text = "the connection to another rank broke, which ended without a word; it may have been killed"
        first = told.say_first(f"rank {distributed.get_rank()}: {text}")
        if first.partition(": ")[2] == text and not lost:
            raise
        raise PeerError(f"hf_longmoe stopped, since another rank failed. {first}") from error
    finally:
        told.close()


class _Told:
    """The message of the rank that failed first, in the store of all ranks, and a thread that looks for it."""

    def __init__(self, grace: float) -> None:
        self.message: str | None = None
        self._grace, self._done = grace, threading.Event()
        store = distributed.group.WORLD.get_group_store()
        self._store = store.clone() if hasattr(store, "clone") else store  # a wait in one does not hold up the other
        # Counted, as another `train()` must not find this one's message; every rank enters as often as the others.
        entered = self._store.add(f"hf_longmoe/entered/{distributed.get_rank()}", 1)
        self._key = f"hf_longmoe/failed/{entered}"
        self._thread = threading.Thread(target=self._look, name="hf_longmoe.end_together", daemon=True)
        self._thread.start()

    def say_first(self, message: str) -> str:
        """Tells `message` unless another rank has told one. Returns the one that stands."""
        if self.message is None:
            try:
                self.message = self._store.compare_set(self._key, "", message).decode()
            except Exception:  # the store may have gone with the process that held it
                return message
            if self.message == message:
                time.sleep(2 * _LOOK_EVERY)  # the store may be this process's own: let the others read it
        return self.message

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(_LOOK_EVERY):
            with contextlib.suppress(Exception):
                if self._store.check([self._key]):
                    self.message = self._store.get(self._key).decode()
                    break
        if self.message is not None and not self._done.wait(self._grace):
            text = f"hf_longmoe ended this process, since another rank failed. {self.message}"
            print(text, file=sys.stderr, flush=True)
            os._exit(1)
