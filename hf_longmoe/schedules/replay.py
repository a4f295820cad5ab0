"""What a checkpointed region may know of its own replay: which pass is running, and what the first pass chose.

Activation checkpointing runs a layer twice: once forward, once more inside backward. Two things depend on telling the
passes apart. Discrete choices (the router's top-k) must be the first pass's, since a near-tie can flip in the second
and send gradients to other experts. And a value that the second pass computes but nothing reads need not be computed.

`checkpoint_once(function)` makes one such region, and `pin_top_k` says in which parts of it top-k is a choice to keep.
It works for every checkpoint function that calls `function` again to replay it (torch's non-reentrant and re-entrant
modes), and needs no bookkeeping by call order: each call of the layer has a closure of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["checkpoint_once", "pin_top_k", "recall", "replaying"]

T = TypeVar("T")

# Per thread (the autograd engine replays a layer in a thread of its own); holds the innermost region's pass.
_current: ContextVar[_Pass | None] = ContextVar("hf_longmoe_replay", default=None)
_TOP_K = (torch.topk, torch.Tensor.topk)
Kept = Callable[[torch.Tensor], None]


class _Pass:
    """One pass over a region. `memory` belongs to the region; the first pass fills it, later ones read it in order."""

    def __init__(self, memory: list, first: bool, kept: Kept | None) -> None:
        self.memory, self.first, self.at, self.kept = memory, first, 0, kept
        self.pinning = 0  # how many `pin_top_k(True)` are in force

    def recall(self, choose: Callable[[], T]) -> T:
        if self.first:
            self.memory.append(choose())
            return self.memory[-1]
        self.at += 1
        return self.memory[self.at - 1]


def recall(choose: Callable[[], T]) -> T:
    """
    `choose()`, and in a replay what it gave in the first pass.

    Both passes must ask in the same order. What it gives lives as long as the region's graph.
    """
    current = _current.get()
    return choose() if current is None else current.recall(choose)


def replaying() -> bool:
    """Whether a region made by `checkpoint_once` is being run again, inside backward."""
    current = _current.get()
    return current is not None and not current.first


def pin_top_k(on: bool) -> None:
    """
    From here on, until the same with `False`, every `topk` takes its indices from the region's first pass.

    Calls nest; outside of a region they do nothing. The indices live as long as the region's graph, 4 bytes each: so
    ask for it around the router, and not around other uses of `topk`. An exception ends the pass, and this with it.
    """
    current = _current.get()
    if current is not None:
        current.pinning += 1 if on else -1


class _PinnedTopK(TorchFunctionMode):
    """
    Where `pin_top_k` asks for it, `topk` takes its indices from the first pass, and its values by `gather`.

    The values, and the gradient (a scatter to the chosen positions), are those of `topk` itself. Both passes build the
    same graph, as non-reentrant checkpointing requires.
    """

    def __init__(self, current: _Pass) -> None:
        super().__init__()
        self.current = current

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TOP_K or not self.current.pinning:
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)

        def choose() -> torch.Tensor:
            with torch.no_grad():  # int32 is half of what top-k gives; these live from forward to backward
                chosen = func(*args, **kwargs)[1].to(torch.int32)
            if self.current.kept is not None:
                self.current.kept(chosen)
            return chosen

        indices = self.current.recall(choose).to(torch.int64)
        return torch.return_types.topk((scores.gather(dim, indices), indices))


@contextlib.contextmanager
def _run(current: _Pass) -> Iterator[None]:
    token = _current.set(current)
    try:
        with _PinnedTopK(current):
            yield
    finally:
        _current.reset(token)


def checkpoint_once(function: Callable, kept: Kept | None = None) -> Callable:
    """
    The same function, whose first call is recorded and whose later calls are replays of it.

    Arguments:
        function: what a checkpoint function is about to run, for ONE call of a layer.
        kept: is handed each tensor of indices that the first pass keeps.

    ```py
    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> scores = torch.tensor([0.2, 0.9, 0.4], requires_grad=True)
    >>> def layer(scores):
    ...     pin_top_k(True)
    ...     chosen = scores.topk(2)[0]
    ...     pin_top_k(False)
    ...     return chosen.exp().sum()
    >>> checkpoint(checkpoint_once(layer), scores, use_reentrant=False).backward()
    >>> bool(scores.grad[0] == 0)
    True

    ```
    """
    memory: list = []
    calls = 0

    def region(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        with _run(_Pass(memory, calls == 1, kept)):
            return function(*args, **kwargs)

    return region
