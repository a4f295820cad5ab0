"""`component(name)`: marks a region of code for every probe that is open. Counts nothing itself."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hf_longmoe.names import nearest_hint

__all__ = [
    "COMPONENTS",
    "OTHER",
    "PHASES",
    "Probe",
    "Region",
    "component",
    "innermost",
    "made",
    "pop",
    "push",
    "tag",
]

COMPONENTS = (
    "dispatch",
    "vocab",
    "boundaries",
    "optimizer",
    "parameters",
    "gradients",
    "layer",
    "aux",
    "other",
)
OTHER = "other"
# "resident" is the moment at which a probe opens, "recompute" the forward that checkpointing replays inside backward,
# "update" the optimizer's step.
PHASES = ("resident", "forward", "recompute", "backward", "update")


class Region:
    """
    One visit of a region: a new object each time that one is entered.

    Arguments:
        again: entered within backward and with grad mode on: all of it, what an autograd function does inside with
            grad mode off too, is "recompute".
    """

    __slots__ = ("again", "capped", "component", "part")

    def __init__(self, component: str, capped: bool = True, part: str = "", again: bool = False):
        self.component, self.capped, self.part, self.again = component, capped, part, again

    @property
    def at_work(self) -> str:
        """
        The component; of a part of it that has a name, `"<component>, <part>"`; of what no cap bounds (a block's
        router, say), `"<component>, uncapped"`.
        """
        part = self.part if self.capped else "uncapped"
        return f"{self.component}, {part}" if part else self.component


class Probe(ABC):
    """What a region needs to know of a probe. An open probe hears of every region, in every thread."""

    # Whether the probe cannot see single storages and autograd nodes, and so wants to be told (`made`).
    needs_telling = False

    @abstractmethod
    def moved(self, region: Region | None) -> None:
        """The calling thread has entered or left a region, and is now in `region`; None: in none."""

    @abstractmethod
    def tag(self, component: str, tensors: Any) -> None:
        """The storages of `tensors` (tensors in any nesting of lists, tuples and dicts) belong to `component`."""

    @abstractmethod
    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has grown or shrunk in place."""

    def keep(self, component: str, tensors: Any) -> None:  # noqa: B027 (only some probes want it)
        """`component` has made `tensors`, which may die while another is at work."""

    def entered_backward(self, region: Region, gradients: Any) -> None:  # noqa: B027
        """From here on, backward works on what `region` recorded. It is handed `gradients`."""

    def _announce(self) -> None:
        _open.append(self)
        # FSDP2 frees and refills gathered parameters by this method, which is no operator. It is inherited from
        # torch._C.StorageBase, so that deleting the override restores it.
        torch.UntypedStorage.resize_ = _resize_

    def _retire(self) -> None:
        _open.remove(self)
        if not _open:
            del torch.UntypedStorage.resize_


def _resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    torch._C.StorageBase.resize_(storage, size)
    for probe in _open:
        probe.resized(storage)
    return storage


# The one piece of global state here, and unavoidable: code deep inside a model marks regions for probes that it was
# never handed. Empty whenever no probe is open.
_open: list[Probe] = []
_thread = threading.local()


def _stack() -> list[Region]:
    try:
        return _thread.stack
    except AttributeError:
        _thread.stack = []
        return _thread.stack


def innermost() -> Region | None:
    """The innermost region that the calling thread is in, or None."""
    stack = _stack()
    return stack[-1] if stack else None


def push(name: str, capped: bool = True, part: str = "") -> Region | None:
    """
    Enters a region and returns what `pop` takes. For module hooks, where a `with` block does not fit.

    Does nothing while no probe is open, and then returns None.

    Arguments:
        name (`str`): one of `COMPONENTS`.
        capped (`bool`, defaults to `True`):
            Whether what it holds inside counts as `working`. Not so for what stands around a schedule.
        part (`str`, defaults to `""`): of the component, where it has parts that are told apart.

    Raises:
        `ValueError`: `name` is none of `COMPONENTS`.
    """
    if not _open:
        return None
    if name not in COMPONENTS:
        hint = nearest_hint(name, COMPONENTS)
        raise ValueError(f"component={name!r} is unknown; choose one of {', '.join(COMPONENTS)}.{hint}")
    region = Region(name, capped, part, torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled())
    _stack().append(region)
    for probe in _open:
        probe.moved(region)
    return region


def pop(region: Region | None) -> None:
    """
    Leaves `region`, and with it every region that was entered inside it and never left (an exception skipped its
    hook). Does nothing where `region` was left already, or is None.
    """
    stack = _stack()
    if region is None or region not in stack:
        return
    del stack[stack.index(region) :]
    for probe in _open:
        probe.moved(innermost())


@contextlib.contextmanager
def component(name: str) -> Iterator[None]:
    """
    Every byte allocated inside belongs to the component `name`, for every probe that is open; so do the bytes that
    backward and checkpointing's recompute allocate for what was recorded inside. Costs a few microseconds while no
    probe is open.

    Arguments:
        name (`str`): one of `COMPONENTS`. Regions nest; the innermost counts.

    ```py
    >>> import torch
    >>> from hf_longmoe.peaks import StorageProbe, component
    >>> with StorageProbe() as probe:
    ...     with component("dispatch"):
    ...         rows = torch.zeros(256)
    >>> probe.report().components["dispatch"].peak
    1024

    ```
    """
    region = push(name)
    try:
        yield
    finally:
        pop(region)


def tag(component: str, *tensors: Any) -> None:
    """Gives the storages of `tensors` to `component` in every open probe, from their birth on."""
    for probe in _open:
        probe.tag(component, tensors)


def made(component: str, *tensors: Any, capped: bool = True) -> None:
    """
    Tells the probes that cannot see it themselves that `component` has just made `tensors`, so that they know whose
    bytes go when these die, and whose work begins when backward reaches them (`capped`: as for `push`).
    """
    told = [probe for probe in _open if probe.needs_telling]
    if not told:
        return

    def reached(gradients: Any) -> None:
        for probe in _open:
            probe.entered_backward(Region(component, capped), gradients)

    for probe in told:
        probe.keep(component, tensors)
    for tensor in tree_leaves(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(reached)
