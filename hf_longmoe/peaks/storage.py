"""`StorageProbe`: follows every tensor storage of a step. Runs on CPU, on `meta` and under `FakeTensorMode`."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from hf_longmoe.peaks.ledger import Context, Ledger, Moment
from hf_longmoe.peaks.region import OTHER, Probe, Region, innermost
from hf_longmoe.peaks.report import PeakReport

__all__ = ["StorageProbe", "rounded", "storages"]

_ACCUMULATE_GRAD = 2**64 - 1  # the sequence number of every AccumulateGrad node
_NOWHERE, _GRADIENTS = Region(OTHER), Region("gradients")
_GRANULE = {"cuda": 512}  # bytes to which a device's allocator rounds up; 1 elsewhere


class StorageProbe(Probe, TorchDispatchMode):
    """
    Peak bytes by component from the storages themselves. A context manager; each use starts afresh.

    It sees every storage that an operator returns, and those that `tag` names; not the scratch inside a kernel, nor
    what was allocated before it opened and never tagged. Costs about 90 microseconds an operator: probe one step in N.
    A function compiled by `torch.compile` runs eagerly while it is open.

    Who an allocation belongs to: in forward, the innermost region. In backward, the region in which the running
    autograd node was recorded (nodes carry sequence numbers; regions note theirs when entered and left). Backward
    with grad mode on is recompute: the regions that the replayed forward enters count, and outside of them the one
    that asked for it. A region that is open around `backward()` takes all of it.

    Arguments:
        device (`torch.device` or `str`, *optional*): count only storages of this device; all by default.

    ```py
    >>> import torch
    >>> with StorageProbe() as probe:
    ...     rows = torch.zeros(256)
    ...     del rows
    >>> probe.report().total
    1024

    ```
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device | str | None = None):
        super().__init__()
        self._device = None if device is None else torch.device(device)
        self._ledger = Ledger()
        self._fresh: dict[Any, bool] = {}
        self._marks: list[int] = []  # sequence numbers, ascending ...
        self._owners: list[Region] = []  # ... and the region that records nodes from there on
        self._home = 0
        self._is_open = False

    # -- life --------------------------------------------------------------------------------------------------------
    def __enter__(self) -> StorageProbe:
        if self._is_open:
            raise RuntimeError("This StorageProbe is open already; close it first, or use a second one.")
        self._is_open = True
        self._home = threading.get_ident()
        self._fake_mode = active_fake_mode()
        self.restart()
        self._announce()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._retire()
        self._is_open = False

    def restart(self) -> None:
        """Starts a new step: what is alive now is resident, and the peaks so far are forgotten."""
        self._ledger.restart()
        self._marks = [torch.autograd._get_sequence_nr()]
        self._owners = [innermost() or _NOWHERE]

    def report(self) -> PeakReport:
        """The peaks since the probe opened or restarted."""
        return self._ledger.report()

    def moments(self) -> dict[tuple[str, str], Moment]:
        """By phase and what is at work (`Region.at_work`): what was alive."""
        return self._ledger.moments()

    # -- whose -------------------------------------------------------------------------------------------------------
    def moved(self, region: Region | None) -> None:
        self._mark(region or self._recorder() or _NOWHERE)

    def tag(self, component: str, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                for storage, device in storages(tensor):
                    if self._counts(device):
                        self._ledger.own(storage, rounded(storage, device), component)

    def resized(self, storage: torch.UntypedStorage, device: torch.device | None = None) -> None:
        self._ledger.resize(storage, rounded(storage, device or storage.device), self._context())

    def _mark(self, region: Region, back: int = 0) -> None:
        if threading.get_ident() == self._home:  # each thread counts its own sequence numbers
            self._marks.append(max(torch.autograd._get_sequence_nr() - back, self._marks[-1]))
            self._owners.append(region)

    def _recorder(self) -> Region | None:
        """The region in which the running autograd node was recorded; None outside of backward."""
        node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
        if node is None:
            return None
        number = node._sequence_nr()
        if number == _ACCUMULATE_GRAD:
            return _GRADIENTS
        place = bisect.bisect_right(self._marks, number) - 1
        return self._owners[place] if place >= 0 else _NOWHERE

    def _context(self) -> Context:
        region = innermost()
        if torch._C._current_graph_task_id() == -1:
            region = region or _NOWHERE
            return region, "update" if region.component == "optimizer" else "forward"
        if region is not None and region.again:
            return region, "recompute"
        if not torch.is_grad_enabled():
            return region or self._recorder() or _NOWHERE, "backward"
        if region is None:
            region = self._recorder() or _NOWHERE
            if region is not self._owners[-1]:
                # The nodes of this replay must lead back to it. Its first operator has taken its number already.
                self._mark(region, back=1)
        return region, "recompute"

    # -- what --------------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensor and its like: they unwrap, and come back with their local tensors
        out = func(*args, **(kwargs or {}))
        if active_fake_mode() is not self._fake_mode:
            return out  # DTensor finding out shapes: no memory
        if func is torch.ops.aten.resize_.default or func is torch.ops.inductor.resize_storage_bytes_.default:
            self.resized(args[0].untyped_storage(), args[0].device)
        elif self._returns_fresh(func):
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    for storage, device in storages(tensor):
                        if self._counts(device) and not self._ledger.knows(storage):
                            self._ledger.add(storage, rounded(storage, device), self._context())
        return out

    def _returns_fresh(self, func: Any) -> bool:
        fresh = self._fresh.get(func)
        if fresh is None:
            higher_order = isinstance(func, torch._ops.HigherOrderOperator)  # has no schema
            # torch.tensor() allocates out of sight and then "lifts" the result, which the schema calls an alias.
            lifts = func is torch.ops.aten.lift_fresh.default
            fresh = higher_order or lifts or any(value.alias_info is None for value in func._schema.returns)
            self._fresh[func] = fresh
        return fresh

    def _counts(self, device: torch.device) -> bool:
        wanted = self._device
        if wanted is None or wanted.type != device.type:
            return wanted is None
        return None in (wanted.index, device.index) or wanted.index == device.index  # Accelerate says "cpu:0"


def storages(tensor: torch.Tensor) -> Iterator[tuple[torch.UntypedStorage, torch.device]]:
    """
    The storages below a tensor, and their devices: several where it wraps others, none where it is sparse or only
    stands for values that have not been computed.
    """
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # DTensor lists its mesh too
                yield from storages(inner)
    elif tensor.layout is torch.strided and _holds_storage(type(tensor)):
        yield tensor.untyped_storage(), tensor.device  # a fake tensor's storage would say "meta"


def _holds_storage(kind: type) -> bool:
    return issubclass(kind, FakeTensor) or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def rounded(storage: torch.UntypedStorage, device: torch.device) -> int:
    """The bytes that a device's allocator spends on a storage."""
    granule = _GRANULE.get(device.type, 1)
    return -(-storage.nbytes() // granule) * granule
