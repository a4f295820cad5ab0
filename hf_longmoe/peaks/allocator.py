"""`AllocatorProbe`: the accelerator's own count of bytes, read whenever a region is entered or left."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from hf_longmoe.peaks.ledger import Runs
from hf_longmoe.peaks.region import COMPONENTS, OTHER, Probe, Region, innermost
from hf_longmoe.peaks.report import ComponentPeak, PeakReport
from hf_longmoe.peaks.storage import rounded, storages

__all__ = ["AcceleratorMemory", "AllocatorProbe", "DeviceMemory", "has_allocator"]

_NOWHERE = Region(OTHER)


class DeviceMemory(Protocol):
    """What the probe needs of an allocator, in bytes."""

    def read(self) -> tuple[int, int]:
        """What is allocated now, and the most that was at once since `reset_peak`."""

    def reset_peak(self) -> None: ...


def has_allocator(device: torch.device) -> bool:
    """Whether `device` has an allocator that `AcceleratorMemory` can read."""
    return device.type != "cpu" and bool(torch.accelerator.memory_stats(device))


class AcceleratorMemory:
    """The caching allocator of one accelerator device: counters on the host, no synchronisation."""

    def __init__(self, device: torch.device | str | None = None):
        self.device = device

    def read(self) -> tuple[int, int]:
        stats = torch.accelerator.memory_stats(self.device)
        return stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"]

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.device)


class AllocatorProbe(Probe):
    """
    Peak bytes by component from the allocator. A context manager; each use starts afresh.

    Between two moments at which it reads the allocator, every byte that appears or disappears is booked to the
    component at work; kernels' workspaces and compiled graphs are seen too. What cannot be told from the outside
    (parameters, gradients, optimizer state, boundaries) is moved to its component when it is tagged, and taken off it
    when it dies. So the components always sum to what is allocated. A component whose memory is freed while another
    is at work can come out too high, and the other too low: compare components with `StorageProbe` where it matters.

    Backward is followed, and what one component hands to another, where the probe is told (`region.made`); without
    that, backward is all booked to `other`.

    It resets the allocator's peak whenever it reads it: `torch.accelerator.max_memory_allocated` means nothing to
    others while it is open.

    Arguments:
        memory (`DeviceMemory`, *optional*): the allocator; the current accelerator's by default.
        device (`torch.device` or `str`, *optional*): tagged storages elsewhere are not counted; the type is enough.
    """

    needs_telling = True

    def __init__(self, memory: DeviceMemory | None = None, device: torch.device | str | None = None):
        self._memory = AcceleratorMemory(device) if memory is None else memory
        self._device = torch.device(device) if device is not None else torch.accelerator.current_accelerator()
        self._lock = threading.RLock()
        self._is_open = False

    def __enter__(self) -> AllocatorProbe:
        if self._is_open:
            raise RuntimeError("This AllocatorProbe is open already; close it first, or use a second one.")
        self._is_open = True
        self.restart()
        self._announce()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._read()
            self._turn(_NOWHERE, self._phase)
        self._retire()
        self._is_open = False

    def restart(self) -> None:
        """Starts a new step: what is allocated now is resident (and `other` until it is tagged)."""
        self._memory.reset_peak()
        self._level, _ = self._memory.read()
        self._total = self._level
        self._live = dict.fromkeys(COMPONENTS, 0)
        self._live[OTHER] = self._level
        self._at_peak = dict(self._live)
        self._high = dict.fromkeys(COMPONENTS, 0)
        self._phase_totals = {"resident": self._level}
        self._phase_highs: dict[str, dict[str, int]] = {}
        self._backward, self._runs = _NOWHERE, Runs(self._live)
        self._now, self._phase = OTHER, "resident"
        self._turn(innermost() or _NOWHERE, "resident")
        self._tagged: dict[int, tuple[str, int, weakref.ref]] = {}
        self._dead: deque[int] = deque()

    def report(self) -> PeakReport:
        """The peaks since the probe opened or restarted."""
        with self._lock:
            if self._is_open:
                self._read()
                self._note_high(self._now, self._runs.high)
            at_peak = _without_negatives(self._at_peak)
            components = {
                name: ComponentPeak(
                    # Rounding up where other components' frees made the running count too low.
                    peak=max(self._high[name], at_peak[name], 0),
                    at_peak=at_peak[name],
                    working=max(self._runs.working[name], 0),
                    phases={phase: max(highs[name], 0) for phase, highs in self._phase_highs.items()},
                )
                for name in COMPONENTS
            }
            return PeakReport(
                total=self._total, components=components, phases=dict(self._phase_totals), probe="allocator"
            )

    # -- whose -------------------------------------------------------------------------------------------------------
    def moved(self, region: Region | None) -> None:
        with self._lock:
            self._read()
            if torch._C._current_graph_task_id() == -1:
                region = region or _NOWHERE
                self._turn(region, "update" if region.component == "optimizer" else "forward")
            elif region is None:
                self._turn(self._backward, "backward")
            else:
                self._turn(region, "recompute" if torch.is_grad_enabled() else "backward")

    def entered_backward(self, region: Region, gradients: Any) -> None:
        with self._lock:
            self.keep(self._now, gradients)
            self._read()
            self._backward = region
            if innermost() is None:
                self._turn(region, "backward")

    def tag(self, component: str, tensors: Any) -> None:
        with self._lock:
            for storage, device in self._storages(tensors):
                self._own(storage, device, component)

    def keep(self, component: str, tensors: Any) -> None:
        with self._lock:
            self._settle()
            for storage, device in self._storages(tensors):
                if storage._cdata not in self._tagged:
                    self._own(storage, device, component)

    def _storages(self, tensors: Any) -> Iterator[tuple[torch.UntypedStorage, torch.device]]:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                for storage, device in storages(tensor):
                    if device.type == self._device.type:
                        yield storage, device

    def resized(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            self._settle()
            if (tagged := self._tagged.get(storage._cdata)) is not None:
                component, before, reference = tagged
                after = rounded(storage, storage.device)
                self._move(after - before, self._now, component)
                self._tagged[storage._cdata] = (component, after, reference)

    def _own(self, storage: torch.UntypedStorage, device: torch.device, component: str) -> None:
        self._settle()
        key = storage._cdata
        if (tagged := self._tagged.get(key)) is not None:
            holder, nbytes, reference = tagged
        else:
            holder, nbytes = self._now, rounded(storage, device)
            reference = weakref.ref(storage, lambda _: self._dead.append(key))
        self._move(nbytes, holder, component)
        self._tagged[key] = (component, nbytes, reference)

    def _move(self, nbytes: int, source: str, target: str) -> None:
        # Where the component at work has just allocated it, the reading to come books it: the books are even again.
        self._live[source] -= nbytes
        self._live[target] += nbytes
        if source == self._now != target:
            self._runs.high -= nbytes  # from birth on, so also at the highest point of the present run

    def _turn(self, region: Region, phase: str) -> None:
        self._note_high(self._now, self._runs.high)
        self._runs.turn(region)
        self._now, self._phase = region.component, phase

    # -- what --------------------------------------------------------------------------------------------------------
    def _read(self) -> None:
        """Books what has happened since the last reading to the component that was at work."""
        level, peak = self._memory.read()
        self._memory.reset_peak()
        rise, now, live = max(peak, level, self._level) - self._level, self._now, self._live
        top = dict(live)
        top[now] += rise
        if self._level + rise > self._total:
            self._total, self._at_peak = self._level + rise, top
        self._phase_totals[self._phase] = max(self._phase_totals.get(self._phase, 0), self._level + rise)
        self._runs.rose(now, top[now])
        for name in COMPONENTS:
            if name != now:  # its own is noted at the end of the run: until then what it made may be moved elsewhere
                self._note_high(name, live[name])
        live[now] += level - self._level
        self._level = level
        self._bury()

    def _note_high(self, name: str, level: int) -> None:
        self._high[name] = max(self._high[name], level)
        highs = self._phase_highs.setdefault(self._phase, dict.fromkeys(COMPONENTS, 0))
        highs[name] = max(highs[name], level)

    def _settle(self) -> None:
        """Books deaths, before an address may be used again. The reading comes first: it needs them still alive."""
        if self._dead:
            self._read()

    def _bury(self) -> None:
        while self._dead:
            component, nbytes, _ = self._tagged.pop(self._dead.popleft())
            # The reading books the drop to the component at work: give that one back what was not its own.
            self._move(nbytes, component, self._now)


def _without_negatives(levels: dict[str, int]) -> dict[str, int]:
    """The same sum without negative levels: what is missing is taken off the highest."""
    missing = -sum(number for number in levels.values() if number < 0)
    levels = {name: max(number, 0) for name, number in levels.items()}
    while missing > 0:
        name = max(levels, key=levels.__getitem__)
        taken = min(levels[name], missing)
        levels[name] -= taken
        missing -= taken
        if not taken:
            break
    return levels
