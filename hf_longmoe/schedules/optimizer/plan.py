"""Integers only: which ranges of which parameters make a bucket, and which bucket goes where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from hf_longmoe.schedules.optimizer.arena import ALIGN, Arena, Entry, padded
from hf_longmoe.sizes import TooSmall

__all__ = ["BOTH_WAYS", "ONE_WAY", "Bucket", "Cuts", "Piece", "Run", "capacity", "cut", "interleave", "split"]

ONE_WAY, BOTH_WAYS = 16, 24  # bytes of a slot for each element; a bucket of each way at once takes 16 + 8
_BLOCK = 2**20  # elements
_SCALAR = 256  # bytes of a slot for the step that the kernel reads


class Piece(NamedTuple):
    """Elements `start` to `stop` of a parameter's local shard, which lie at `at` in the bucket."""

    entry: Entry
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def home(self) -> int:
        """Where it begins in its arena."""
        return self.entry.offset + self.start


class Run(NamedTuple):
    """`numel` elements that follow each other both in the arena, from `home`, and in the bucket, from `at`."""

    home: int
    at: int
    numel: int


@dataclass(eq=False)
class Bucket:
    """Elements in flight together, padding included; all of one arena."""

    arena: Arena
    pieces: list[Piece] = field(default_factory=list)
    numel: int = 0

    @cached_property
    def blocks(self) -> list[Bucket]:
        """What is cast and updated on the host while it is in its cache."""
        return split(self, _BLOCK)

    def runs(self) -> list[Run]:
        found: list[Run] = []
        for piece in self.pieces:
            length = padded(piece.numel)
            if found and found[-1].home + found[-1].numel == piece.home and found[-1].at + found[-1].numel == piece.at:
                found[-1] = found[-1]._replace(numel=found[-1].numel + length)
            else:
                found.append(Run(piece.home, piece.at, length))
        return found


def capacity(nbytes: int, each: int) -> int:
    """
    Elements of a bucket that takes `nbytes` of device memory at `each` bytes an element: a multiple of 64.

    Raises:
        `ValueError`: `nbytes` is too small for 64 elements.
    """
    found = (nbytes - _SCALAR) // each // ALIGN * ALIGN
    if found < ALIGN:
        raise TooSmall(f"bucket={nbytes} bytes is too small; give at least {ALIGN * each + _SCALAR} bytes.")
    return found


def cut(entries: Sequence[Entry], most: int) -> list[Bucket]:
    """
    Buckets of at most `most` elements (a multiple of 64): small parameters share one, a large one is cut, always at a
    multiple of 64 elements from its start.

    Arguments:
        entries: in the order of their arenas, and there of their ranges.
    """
    buckets: list[Bucket] = []
    for entry in entries:
        start = 0
        while start < entry.numel:
            if not buckets or buckets[-1].arena is not entry.arena or buckets[-1].numel == most:
                buckets.append(Bucket(entry.arena))
            bucket = buckets[-1]
            stop = min(entry.numel, start + most - bucket.numel)
            bucket.pieces.append(Piece(entry, start, stop, bucket.numel))
            bucket.numel += padded(stop - start)
            start = stop
    return buckets


class Cuts:
    """`cut`, remembered for steps in which the same parameters have gradients."""

    def __init__(self) -> None:
        self._known: dict[tuple[Arena, int], tuple[list[Entry], list[Bucket]]] = {}

    def of(self, entries: Sequence[Entry], most: int) -> list[Bucket]:
        if not entries:
            return []
        key = entries[0].arena, most
        if key not in self._known or self._known[key][0] != list(entries):
            self._known[key] = list(entries), cut(entries, most)
        return self._known[key][1]


def split(bucket: Bucket, most: int) -> list[Bucket]:
    """The bucket in blocks of at most `most` elements (a multiple of 64); positions remain those in the bucket."""
    blocks: list[Bucket] = []
    for piece in bucket.pieces:
        start = piece.start
        while start < piece.stop:
            if not blocks or blocks[-1].numel == most:
                blocks.append(Bucket(bucket.arena))
            block = blocks[-1]
            stop = min(piece.stop, start + most - block.numel)
            block.pieces.append(Piece(piece.entry, start, stop, piece.at + start - piece.start))
            block.numel += padded(stop - start)
            start = stop
    return blocks


def interleave(buckets: Sequence[Bucket], share: float) -> Iterator[tuple[Bucket, bool]]:
    """
    The buckets in the order of work, each with whether the accelerator updates it: the first `share` of the elements.
    The two kinds alternate in proportion to their numbers, one of the host's first.
    """
    total, taken, first = sum(bucket.numel for bucket in buckets), 0, 0
    while first < len(buckets) and taken + buckets[first].numel / 2 <= share * total:
        taken += buckets[first].numel
        first += 1
    device, host = buckets[:first], buckets[first:]
    done = 0
    for number, bucket in enumerate(host):
        yield bucket, False
        until = len(device) * (number + 1) // len(host)
        yield from ((other, True) for other in device[done:until])
        done = until
    yield from ((other, True) for other in device[done:])
