"""The parameters that have a place for their state, and what a step does with them."""

from __future__ import annotations

import logging
import time
import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hf_longmoe.config import OptimizerConfig
from hf_longmoe.schedules.host import AcceleratorEngine, Engine, Job, check_host_memory, has_own_memory
from hf_longmoe.schedules.optimizer.arena import HALF, Arena, Entry, flat, lay_out, local, padded, same_order
from hf_longmoe.schedules.optimizer.checks import check_gradient, check_parameter, check_state
from hf_longmoe.schedules.optimizer.choose import agree
from hf_longmoe.schedules.optimizer.early import EarlyGradients
from hf_longmoe.schedules.optimizer.loading import SHARE
from hf_longmoe.schedules.optimizer.plan import Cuts
from hf_longmoe.schedules.optimizer.record import Record
from hf_longmoe.schedules.optimizer.staging import Slabs, Staging
from hf_longmoe.schedules.optimizer.stream import Stream
from hf_longmoe.schedules.optimizer.update import host_threads, in_arena, update
from hf_longmoe.sizes import format_bytes

__all__ = ["Book"]

logger = logging.getLogger(__name__)

Groups = list[dict[str, Any]]

_FIXED = {"accelerator": 1.0, "cpu": 0.0}  # the accelerator's share
_IN_PLACE = 2**20  # elements that are cast and updated together where nothing is copied
_ANY = 2**62
_MANY = 2**18  # elements from which more threads are worth it


class Book:
    """
    Arguments:
        caps (`OptimizerConfig`): of device memory, and who updates.
        engine (`Engine`, *optional*): found from the parameters' device where it is not given.
    """

    def __init__(self, caps: OptimizerConfig, engine: Engine | None) -> None:
        self.caps, self.engine = caps, engine
        self.entries: dict[torch.Tensor, Entry] = {}
        self._arenas: list[Arena] = []
        self._cuts = Cuts()
        self._threads_told = False
        self._slabs: Slabs | None = None
        self._stream: Stream | None = None
        self._early: EarlyGradients | None = None
        if engine is not None:
            self._use(engine)

    def _use(self, engine: Engine) -> None:
        self.engine, self._slabs = engine, Slabs(engine)
        weakref.finalize(self, self._slabs.close).atexit = False
        self._stream = Stream(self.caps.bucket, self.caps.slots, Staging(self._slabs))
        if self.caps.early_gradients:
            self._early = EarlyGradients(self._slabs, self.caps.slots * self.caps.bucket)

    # -- places -----------------------------------------------------------------------------------------------------
    @staticmethod
    def names(groups: Groups) -> dict[torch.Tensor, str]:
        found = {}
        for number, group in enumerate(groups):
            known = group.get("param_names") or ()
            for place, param in enumerate(group["params"]):
                name = known[place] if place < len(known) else f"parameter {place} of group {number}"
                found[param] = f"{name} {tuple(param.shape)}"
        return found

    def build(self, groups: Groups, state: dict[torch.Tensor, Any]) -> None:
        """
        Finds places for trainable parameters that have none, or that are on another device, or of another dtype or
        size, than they were.

        Raises:
            `ValueError`: a parameter cannot be updated.
            `MemoryError`: the host does not have the memory; nothing is kept then.
        """
        new = []
        for group in groups:
            for param in group["params"]:
                if param.requires_grad or param.grad is not None:
                    entry = self.entries.get(param)
                    if entry is None or not entry.fits(local(param)):
                        new.append(param)
        if not new:
            return
        names = self.names(groups)
        for param in new:
            check_parameter(param, names[param])
            if state.get(param):
                check_state(state[param], param, names[param])
        self._find_engine({local(param).device for param in new})
        resident = self._fits(new)
        entries, arenas = lay_out(
            [(param, names[param]) for param in new],
            lambda device: self.engine is not None and device == self.engine.device and not resident,
            len(self._arenas),
        )
        needed = sum(arena.nbytes for arena in arenas if arena.streamed or arena.device.type == "cpu")
        check_host_memory(needed, "The state of OffloadStreamAdamW")
        taken: list[torch.Tensor] = []
        try:
            for arena in arenas:
                arena.allocate(lambda numel, arena: self._take(numel, arena, taken))
        except MemoryError:
            for memory in taken:
                self._slabs.give(memory)
            raise
        self._arenas += arenas
        for entry in entries:
            self.entries[entry.param] = entry
            if state.get(entry.param):
                entry.adopt(state[entry.param])
                state[entry.param] = entry.state()

    def _take(self, numel: int, arena: Arena, taken: list[torch.Tensor]) -> torch.Tensor:
        if arena.streamed:
            taken.append(self._slabs.take(4 * numel))
            return taken[-1].view(torch.float32)
        return self._memory(numel, arena.device)

    def _memory(self, numel: int, device: torch.device) -> torch.Tensor:
        if self._on_engine(device):
            return self.engine.empty(numel, torch.float32)
        return torch.empty(numel, dtype=torch.float32, device=device)

    def _on_engine(self, device: torch.device) -> bool:
        return self.engine is not None and device == self.engine.device

    def _find_engine(self, devices: set[torch.device]) -> None:
        known = set() if self.engine is None else {self.engine.device}
        accelerators = {device for device in devices if has_own_memory(device)} | known
        if len(accelerators) > 1:
            raise ValueError(
                f"Parameters are on {', '.join(sorted(map(str, accelerators)))}; an OffloadStreamAdamW serves one "
                "device. Make one for each."
            )
        if accelerators and self.engine is None:
            self._use(AcceleratorEngine(accelerators.pop()))

    def _fits(self, new: list[torch.Tensor]) -> bool:
        """Whether all of the state fits the slots of a step, so that nothing is gained by taking it away."""
        if self.engine is None or self.caps.update_on != "auto" or self.caps.early_gradients:
            return False
        if any(arena.streamed for arena in self._arenas):
            return False
        elements = [(arena.half, arena.numel) for arena in self._arenas if self._on_engine(arena.device)]
        elements += [(p.dtype in HALF, padded(local(p).numel())) for p in new if self._on_engine(local(p).device)]
        needed, cap = sum((16 if half else 8) * numel for half, numel in elements), self.caps.slots * self.caps.bucket
        if elements and needed <= cap:
            logger.info(
                "The optimizer's state takes %s on the device, no more than the %s of a step's slots: it stays there.",
                *map(format_bytes, (needed, cap)),
            )
        return needed <= cap

    def resident(self) -> list[torch.Tensor]:
        return [memory for arena in self._arenas if not arena.streamed for memory in arena.flats.values()]

    def adopt(self, found: dict[Any, Any], state: dict[Any, Any]) -> None:
        """Takes loaded states, into `state` too. A parameter that is not among them begins anew."""
        for param, entry in self.entries.items():
            if param not in found:
                entry.blank()
        for param, values in found.items():
            if param in self.entries:
                self.entries[param].adopt(values)
                state[param] = self.entries[param].state()
            elif isinstance(param, torch.Tensor):  # it has no place yet
                state[param] = {
                    **values,
                    "step": torch.tensor(float(values["step"]), dtype=torch.float32, device="cpu"),
                }
            else:
                state[param] = values

    # -- gradients during backward ----------------------------------------------------------------------------------
    def take_early(self, param: torch.Tensor) -> None:
        self._early.take(self.entries[param])

    def drop_early(self) -> None:
        if self._early is not None:
            self._early.clear()

    # -- a step -----------------------------------------------------------------------------------------------------
    def live(self, groups: Groups, state: dict[torch.Tensor, Any]) -> list[Entry]:
        """The entries with a gradient, in the order of their arenas, ready for `update`."""
        self.build(groups, state)
        found = []
        for group in groups:
            numbers = tuple(float(x) for x in (group["lr"], *group["betas"], group["eps"], group["weight_decay"]))
            for param in group["params"]:
                entry = self.entries.get(param)
                if entry is not None and self._gradient(entry):
                    self._follow(entry, state)
                    entry.value = flat(local(param))
                    entry.launch = (*numbers, float(entry.step) + 1)
                    if entry.arena.half and not entry.trusted and entry.seen != entry.version():
                        entry.fresh = True
                    found.append(entry)
        return sorted(found, key=lambda entry: (entry.arena.number, entry.offset))

    @staticmethod
    def _follow(entry: Entry, state: dict[torch.Tensor, Any]) -> None:
        """The state is what `optimizer.state` shows: cleared, or given other tensors, by whoever likes."""
        values = state.get(entry.param)
        if not values and entry.shown:
            entry.blank()
        elif values and entry.replaced(values):
            check_state(values, entry.param, entry.name)
            entry.adopt(values)
        elif values:
            return
        state[entry.param] = entry.state()

    def _gradient(self, entry: Entry) -> bool:
        grad, came = entry.param.grad, self._early is not None and entry in self._early
        if grad is not None:
            check_gradient(grad, entry.name)
            if came:
                raise RuntimeError(
                    f"early_gradients=True: {entry.name} has a gradient again after it travelled. DistributedData"
                    "Parallel writes gradients after their hooks; use FSDP2, or early_gradients=False."
                )
            if self._early is not None and entry.arena.streamed:
                self._early.take(entry)
                came = True
        if came:
            entry.grad, entry.grad_dtype = None, entry.arena.dtype
        elif grad is not None:
            if isinstance(grad, DTensor) and grad.placements != entry.param.placements:
                grad = grad.redistribute(entry.param.device_mesh, entry.param.placements)
            entry.grad = same_order(local(grad), local(entry.param))
            entry.grad_dtype = grad.dtype
        return came or grad is not None

    def update(self, live: list[Entry], groups: Groups, record: Record) -> Job | None:
        """Updates them. Returns the job after which the parameters are new; None where nothing was copied."""
        streamed = [entry for entry in live if entry.arena.streamed]
        share, first = self._share(groups), False
        if share is None and self.engine is not None:
            first = any(float(group["lr"]) > 0 for group in groups)  # else it is a step that only makes the state
            share = None if first else 1.0
        beside = [entry for entry in live if entry.arena.device.type == "cpu" and not entry.arena.streamed]
        on_host = sum(entry.numel for entry in (*beside, *(streamed if share != 1.0 else ())))
        # Without a device the whole training has the threads that it was given: as many here.
        more = self.engine is not None and on_host >= _MANY
        with host_threads(not self._threads_told) if more else nullcontext(False) as raised:
            self._threads_told |= raised
            self._update_in_place([entry for entry in live if not entry.arena.streamed], record)
            if self.engine is None:
                return None
            if not first:
                return self._stream.step(streamed, share, record, self._early) if streamed else None
            share, job = self._stream.choose(streamed, self.caps.update_on == "both", record)
        share = agree(share)
        logger.info("The accelerator updates %.0f%% of the elements, the host the others.", 100 * share)
        for group in groups:
            group[SHARE] = share
        return job

    def _share(self, groups: Groups) -> float | None:
        if self.caps.early_gradients:
            return 0.0
        if self.caps.update_on in _FIXED:
            return _FIXED[self.caps.update_on]
        found = next((group[SHARE] for group in groups if group.get(SHARE) is not None), None)
        return None if self.caps.update_on == "both" and found in (0.0, 1.0) else found

    def _update_in_place(self, entries: list[Entry], record: Record) -> None:
        for arena in dict.fromkeys(entry.arena for entry in entries):
            some = [entry for entry in entries if entry.arena is arena]
            cast = any(entry.grad_dtype != torch.float32 for entry in some)
            buckets = self._cuts.of(some, _IN_PLACE if cast or arena.half else _ANY)
            room = max((bucket.numel for bucket in buckets), default=0) if cast else 0
            memory = self._memory(room + 1, arena.device)
            for bucket in buckets:
                state = {kind: in_arena(arena.flats[kind], bucket.pieces) for kind in arena.kinds}
                work = update(bucket, state, memory, memory[-1:])
                record.touched(bucket.pieces)
                if self._on_engine(arena.device):
                    record.run(work)
                else:
                    begun = time.perf_counter()
                    work()
                    record.host_seconds += time.perf_counter() - begun
                record.done(bucket.pieces, "accelerator" if self._on_engine(arena.device) else "host")

    def end(self, live: list[Entry], record: Record) -> None:
        """Counts what has been updated, and lets go of gradients and jobs."""
        whole = [entry for entry in live if record.whole(entry)]
        if whole:
            torch._foreach_add_([entry.step for entry in whole], 1)
        for entry in live:
            if record.whole(entry):
                entry.fresh = False
            if record.whole(entry) or record.half_done(entry):
                entry.trusted, entry.seen = False, entry.version()
            entry.grad = entry.value = None
            entry.launch = ()
        self.drop_early()
        if self._slabs is not None:
            self._slabs.jobs = [job for _, job in record.jobs]
