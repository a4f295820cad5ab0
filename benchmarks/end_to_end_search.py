"""The longest context within a budget, from steps that are really run: the line through two says where to look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Found", "search"]


@dataclass(frozen=True)
class Found:
    """
    Arguments:
        limit (`int`): the budget in bytes.
        peaks (`dict[int, int]`): bytes of every step that was run, by its tokens.
        reach (`int`): the most tokens of a step that was run and kept the budget; 0 if none did.
    """

    limit: int
    peaks: dict[int, int]
    reach: int

    @property
    def beyond(self) -> int | None:
        """Tokens of the shortest step that was run and did not keep the budget."""
        return min((tokens for tokens, nbytes in self.peaks.items() if nbytes > self.limit), default=None)


def search(
    peak: Callable[[int], int],
    limit: int,
    start: int,
    *,
    unit: int = 64,
    close: float = 1.03,
    beyond: float | None = 1.1,
    steps: int = 12,
) -> Found:
    """
    Steps of `start` and twice as many tokens, then those at which the line through the last two meets the budget.

    The last keeps the budget, and less than `close` times its tokens would end it by the line; one of at most `beyond`
    times its tokens was run and did not keep it.

    Arguments:
        peak: bytes of a step of so many tokens, which it runs.
        limit: the budget in bytes.
        start: tokens of the shortest step, unless that is too long already.
        unit: numbers of tokens are multiples of it.
        beyond: `None`: nothing is run of which the line says that it does not fit.
        steps: that are run at most.
    """
    peaks: dict[int, int] = {}

    def fits(tokens: int) -> bool:
        if tokens not in peaks:
            peaks[tokens] = peak(tokens)
        return peaks[tokens] <= limit

    def whole(tokens: float) -> int:
        return max(unit, int(tokens) // unit * unit)

    first = whole(start)
    while not fits(first):
        if first == unit:
            return Found(limit, peaks, 0)
        first = whole(first / 2)
    fits(2 * first if first == whole(start) else max(unit, whole(first * 0.75)))
    low = first
    while len(peaks) < steps:
        known = sorted(tokens for tokens, nbytes in peaks.items() if nbytes <= limit)
        low, high = known[-1], min((tokens for tokens, nbytes in peaks.items() if nbytes > limit), default=None)
        guess = whole(_end(known, peaks, limit))
        if high is not None and guess >= high:
            guess = whole((low + high) / 2)
        if guess > low * close:
            fits(guess)
        elif beyond is None or (high is not None and high <= max(low * beyond, low + unit)):
            break
        else:
            fits(max(low + unit, whole(low * beyond)))
    return Found(limit, peaks, low)


def _end(known: list[int], peaks: dict[int, int], limit: int) -> float:
    """Where the line through the two longest steps meets the budget; that through zero, if there is only one."""
    low, before = known[-1], known[-2] if len(known) > 1 else 0
    slope = (peaks[low] - peaks.get(before, 0)) / (low - before)
    return low + (limit - peaks[low]) / slope if slope > 0 else 2 * low
