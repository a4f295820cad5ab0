"""Which schedules a budget of device memory needs, and how large their caps may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hf_longmoe.config import BoundariesConfig, DispatchConfig, LongMoEConfig, OptimizerConfig, VocabConfig

__all__ = ["NOTHING", "SMALLEST", "choose", "longest"]

NOTHING = LongMoEConfig(dispatch=None, vocab=None, boundaries=None, optimizer=None)
_MIB = 2**20
_BUDGETS = tuple(size * _MIB for size in (256, 128, 64, 32, 16, 8, 4))
_BUCKETS = (64 * _MIB, 16 * _MIB)
SMALLEST = LongMoEConfig(
    dispatch=DispatchConfig(budget=32 * _MIB),
    vocab=VocabConfig(budget=32 * _MIB),
    optimizer=OptimizerConfig(bucket=_BUCKETS[-1]),
)


def candidates() -> Iterator[LongMoEConfig]:
    """
    From nothing to all four, the larger caps first: dispatch and vocabulary cost no time, boundaries next to none, the
    offloaded optimizer some of each step.
    """
    yield NOTHING
    for boundaries, optimizer in ((False, False), (True, False), (False, True), (True, True)):
        for budget in _BUDGETS:
            for bucket in _BUCKETS if optimizer else (None,):
                yield LongMoEConfig(
                    dispatch=DispatchConfig(budget=budget),
                    vocab=VocabConfig(budget=budget),
                    boundaries=BoundariesConfig() if boundaries else None,
                    optimizer=OptimizerConfig(bucket=bucket) if optimizer else None,
                )


def choose(total: Callable[[LongMoEConfig], int | None], limit: int) -> tuple[LongMoEConfig | None, int]:
    """
    The first of `candidates` that fits.

    Arguments:
        total: bytes of device memory with these caps; `None` where a cap is too small for the model.
        limit: bytes.

    Returns:
        The caps, and their total; `None`, and the smallest total, if none fit.
    """
    least: int | None = None
    for caps in candidates():
        found = total(caps)
        if found is None:
            continue
        if found <= limit:
            return caps, found
        least = found if least is None else min(least, found)
    return None, least


def longest(total: Callable[[int], int], limit: int, unit: int, most: int = 2**27) -> int | None:
    """
    The largest number of tokens, a multiple of `unit`, at which `total` is within `limit`.

    Arguments:
        total: bytes by tokens; it never falls.
        most: no larger number is tried.

    Returns:
        Tokens; `None` if not even `unit` fits.
    """
    low, high = 0, max(1, most // unit)
    while low < high:
        middle = (low + high + 1) // 2
        if total(middle * unit) <= limit:
            low = middle
        else:
            high = middle - 1
    return low * unit or None
