"""Which schedules a budget of device memory needs, and how large their caps may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hf_longmoe.config import BoundariesConfig, DispatchConfig, LongMoEConfig, OptimizerConfig, VocabConfig

__all__ = ["MOST", "NOTHING", "choose", "longest"]

NOTHING = LongMoEConfig(dispatch=None, vocab=None, boundaries=None, optimizer=None)
MOST = 2**27  # tokens: longer sequences are not looked at
_MIB = 2**20
_BUDGETS = tuple(size * _MIB for size in (256, 128, 64, 32, 16, 8, 4))
_BUCKETS = (64 * _MIB, 16 * _MIB)


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


def choose(total: Callable[[LongMoEConfig], int | None], limit: int) -> tuple[LongMoEConfig, int]:
    """
    The first of `candidates` that fits, else the one with the least total.

    Arguments:
        total: bytes of device memory with these caps; `None` where a cap is too small for the model.
        limit: bytes.

    Returns:
        The caps, and their total.
    """
    least: tuple[LongMoEConfig, int] | None = None
    for caps in candidates():
        found = total(caps)
        if found is None:
            continue
        if found <= limit:
            return caps, found
        if least is None or found < least[1]:
            least = caps, found
    return least


def longest(total: Callable[[int], int], limit: int, unit: int, most: int = MOST) -> int | None:
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
