"""A rehearsal: a schedule runs without data (fake tensors), to show what memory it takes.

Two things are missing then. Numbers that a plan reads from the data are given instead. And what a schedule repeats
(waves, tiles, slices of rows) need not be run every time: a repetition allocates what the one before it did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Rehearsal", "each", "rehearsal", "rehearsing"]

T = TypeVar("T")
_current: ContextVar[Rehearsal | None] = ContextVar("hf_longmoe_rehearsal", default=None)


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """
    Arguments:
        ignored_labels: of each call's labels, how many are to be ignored (each sequence's last token has none).
        skips: whether repetitions are skipped.
    """

    ignored_labels: int = 0
    skips: bool = True


@contextlib.contextmanager
def rehearsal(given: Rehearsal) -> Iterator[None]:
    """Inside, in this thread, schedules take their numbers from `given`. What they compute means nothing."""
    token = _current.set(given)
    try:
        yield
    finally:
        _current.reset(token)


def rehearsing() -> Rehearsal | None:
    """The rehearsal that this thread is in, if any."""
    return _current.get()


def each(items: Iterable[T], kind: Callable[[T], Hashable]) -> Iterable[T]:
    """
    `items`; in a rehearsal only those that show something new.

    That is so where an item's kind, or the kind of the one before it (of which something may still be alive), makes a
    pair that was not there before. Both of the pair are run, in order.

    Arguments:
        kind: what an item's allocations depend on.
    """
    given = _current.get()
    if given is None or not given.skips:
        return items
    items = list(items)
    kinds = [kind(item) for item in items]
    first: dict[tuple[Hashable, Hashable], int] = {}
    for i, pair in enumerate(zip([None, *kinds], kinds, strict=False)):
        first.setdefault(pair, i)
    shown = {i for at in first.values() for i in (at - 1, at) if i >= 0}
    return [items[i] for i in sorted(shown)]
