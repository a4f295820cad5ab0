"""
The order of rows; where those of a wave lie in the buffer that a rank receives, and how they are cut into tiles to
compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Tile", "gather_rows", "rows_by", "tiles", "write_rows"]


def rows_by(key: torch.Tensor) -> torch.Tensor:
    """`[rows]` integers -> `[rows]` int32: the rows by key, ties by row."""
    return torch.sort(key, stable=True)[1].to(torch.int32)


@dataclass(frozen=True)
class Tile:
    """
    Rows that are computed together.

    Arguments:
        experts: global ids, ascending, with the number of rows of each; consecutive in the tile.
        parts: where the rows lie in the received buffer, in the tile's order.
    """

    experts: tuple[tuple[int, int], ...]
    parts: tuple[slice, ...]

    @property
    def first(self) -> int:
        """The first expert; a foreign one is the only one."""
        return self.experts[0][0]


def tiles(
    receives: Sequence[tuple[int, Sequence[int]]], splits: Sequence[int], limit: int, span: int | None, home: range
) -> Iterator[Tile]:
    """
    Cuts one wave's received rows into tiles.

    Arguments:
        receives: (expert, rows from each source), in the order in which each source has sent them; the buffer holds
            one source after the other.
        splits: rows from each source.
        limit: rows of a tile at most; an expert with more is cut into equal parts.
        span: how many consecutive experts a tile may span; `None` for any number.
        home: the rank's own experts. A foreign one is always in a tile of its own.
    """
    at = [sum(splits[:source]) for source in range(len(splits))]
    experts: list[tuple[int, int]] = []
    parts: list[slice] = []
    for expert, by_source in receives:
        lies = [slice(at[s], at[s] + rows) for s, rows in enumerate(by_source) if rows]
        at = [start + rows for start, rows in zip(at, by_source, strict=True)]
        total = sum(by_source)
        cuts = -(-total // limit)
        for cut in range(cuts):
            start, stop = total * cut // cuts, total * (cut + 1) // cuts
            full = sum(rows for _, rows in experts) + stop - start > limit
            wide = experts and span is not None and expert - experts[0][0] >= span
            apart = experts and (expert not in home or experts[0][0] not in home)
            if experts and (full or wide or apart):
                yield Tile(tuple(experts), tuple(parts))
                experts, parts = [], []
            experts.append((expert, stop - start))
            parts.extend(_range_of(lies, start, stop))
    if experts:
        yield Tile(tuple(experts), tuple(parts))


def _range_of(lies: Sequence[slice], start: int, stop: int) -> Iterator[slice]:
    """Rows `start` to `stop` of the rows that lie in these slices, one slice after the other."""
    position = 0
    for lie in lies:
        rows = lie.stop - lie.start
        first, last = max(start - position, 0), min(stop - position, rows)
        if first < last:
            yield slice(lie.start + first, lie.start + last)
        position += rows


def gather_rows(buffer: torch.Tensor, parts: Sequence[slice]) -> torch.Tensor:
    """The rows of a tile, contiguous, in its order; a view where they lie so already."""
    if len(parts) == 1:
        return buffer[parts[0]].contiguous()
    return torch.cat([buffer[part] for part in parts])


def write_rows(buffer: torch.Tensor, parts: Sequence[slice], rows: torch.Tensor) -> None:
    """Puts a tile's rows where they belong in `buffer`."""
    for part, values in zip(parts, rows.split([part.stop - part.start for part in parts]), strict=True):
        if values.data_ptr() != buffer[part].data_ptr():
            buffer[part].copy_(values)
