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
import copy
import dataclasses
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
Store = Callable[[torch.Tensor], Callable[[], torch.Tensor]]


class _Stored:
    """Stands for a tensor that was given to `store`; `give_back()` has it again."""

    def __init__(self, give_back: Callable[[], torch.Tensor]) -> None:
        self.give_back = give_back


def _swap(value: Any, kind: type, swap: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """`value` with each object of `kind` swapped, in any nesting of tuples, lists and dataclasses; shared, once."""
    if id(value) in done:
        return done[id(value)]
    new = value
    if isinstance(value, kind):
        new = swap(value)
    elif type(value) in (tuple, list) and not all(type(item) is int for item in value):  # of which plans have many
        items = [_swap(item, kind, swap, done) for item in value]
        if any(a is not b for a, b in zip(items, value, strict=True)):
            new = type(value)(items)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        after = {name: _swap(part, kind, swap, done) for name, part in before.items()}
        if any(after[name] is not before[name] for name in before):
            new = copy.copy(value)
            for name in before:
                object.__setattr__(new, name, after[name])  # frozen ones too
    done[id(value)] = new
    return new


class _Pass:
    """One pass over a region. `memory` belongs to the region; the first pass fills it, later ones read it in order."""

    def __init__(self, memory: list, first: bool, kept: Kept | None, store: Store | None) -> None:
        self.memory, self.first, self.at, self.kept, self.store = memory, first, 0, kept, store
        self.pinning = 0  # how many `pin_top_k(True)` are in force

    def recall(self, choose: Callable[[], T], shared: bool = False) -> T:
        if self.first:
            value, store = choose(), self.store
            kept = value
            if store is not None and not shared:
                kept = _swap(value, torch.Tensor, lambda tensor: _Stored(store(tensor)), {})
            self.memory.append((kept, kept is not value))
            return value
        self.at += 1
        kept, away = self.memory[self.at - 1]
        return _swap(kept, _Stored, lambda stored: stored.give_back(), {}) if away else kept


def recall(choose: Callable[[], T], shared: bool = False) -> T:
    """
    `choose()`, and in a replay what it gave in the first pass.

    Both passes must ask in the same order. What it gives lives as long as the region's graph; where the region has a
    `store`, tensors in it (also inside of tuples, lists and dataclasses) are kept there, and a replay gets others of
    the same values. Not so what is `shared`: what somebody else holds anyway.
    """
    current = _current.get()
    return choose() if current is None else current.recall(choose, shared)


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


def checkpoint_once(function: Callable, kept: Kept | None = None, store: Store | None = None) -> Callable:
    """
    The same function, whose first call is recorded and whose later calls are replays of it.

    Arguments:
        function: what a checkpoint function is about to run, for ONE call of a layer.
        kept: is handed each tensor of indices that the first pass keeps.
        store: takes each tensor that the first pass keeps, and returns what gives it back in a replay.

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
        with _run(_Pass(memory, calls == 1, kept, store)):
            return function(*args, **kwargs)

    return region
