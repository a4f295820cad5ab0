"""What a checkpointed region may know of its own replay: which pass is running, and what the first pass chose.

Activation checkpointing runs a layer twice: once forward, once more inside backward. Two things depend on telling the
passes apart. Discrete choices (the router's top-k) must be the first pass's, since a near-tie can flip in the second
and send gradients to other experts. And a value that the second pass computes but nothing reads need not be computed.

`checkpoint_once(function)` makes one such region. It works for every checkpoint function that calls `function` again
to replay it (torch's non-reentrant and re-entrant modes), and needs no bookkeeping by call order: each call of the
layer has a closure of its own.
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


class _Pass:
    """One pass over a region. `memory` belongs to the region; the first pass fills it, later ones read it in order."""

    def __init__(self, memory: list, first: bool) -> None:
        self.memory, self.first, self.at = memory, first, 0

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


class pin_top_k(TorchFunctionMode):
    """
    Inside, every `topk` takes its indices from the first pass of the region, and its values by `gather`.

    The values, and the gradient (a scatter to the chosen positions), are those of `topk` itself. Both passes build the
    same graph, as non-reentrant checkpointing requires.
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TOP_K:
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)

        def choose() -> torch.Tensor:
            with torch.no_grad():  # int32 is half of what top-k gives; these live from forward to backward
                return func(*args, **kwargs)[1].to(torch.int32)

        indices = recall(choose).to(torch.int64)
        return torch.return_types.topk((scores.gather(dim, indices), indices))


@contextlib.contextmanager
def _run(current: _Pass) -> Iterator[None]:
    token = _current.set(current)
    try:
        with pin_top_k():
            yield
    finally:
        _current.reset(token)


def checkpoint_once(function: Callable) -> Callable:
    """
    The same function, whose first call is recorded and whose later calls are replays of it.

    Arguments:
        function: what a checkpoint function is about to run, for ONE call of a layer.

    ```py
    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> scores = torch.tensor([0.2, 0.9, 0.4], requires_grad=True)
    >>> layer = checkpoint_once(lambda scores: scores.topk(2)[0].exp().sum())
    >>> checkpoint(layer, scores, use_reentrant=False).backward()
    >>> bool(scores.grad[0] == 0)
    True

    ```
    """
    memory: list = []
    calls = 0

    def region(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        with _run(_Pass(memory, first=calls == 1)):
            return function(*args, **kwargs)

    return region
