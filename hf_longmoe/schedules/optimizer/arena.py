"""
Where the state lives: flat float32 slabs, one of each kind, in which every parameter has a range.

Each range begins at a multiple of 64 elements and is as long as the parameter's local shard. What an optimizer shows
as `state[parameter]["exp_avg"]` is a view of its range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

__all__ = [
    "ALIGN",
    "HALF",
    "MOMENTS",
    "Arena",
    "Entry",
    "flat",
    "lay_out",
    "local",
    "padded",
    "same_order",
    "state_bytes",
]

ALIGN = 64  # elements; a cut elsewhere changes low bits of the fused kernel's result
HALF = (torch.bfloat16, torch.float16)
MOMENTS = ("exp_avg", "exp_avg_sq")


def padded(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of `tensor`, without its history. It shares the memory and the version."""
    with torch.no_grad():
        shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        wait = getattr(shard, "wait", None)  # a collective's result that may be on its way
        return (wait() if wait is not None else shard).detach()


def state_bytes(params: Sequence[torch.Tensor]) -> int:
    """
    Bytes of host memory that the state of `params` (of their local shards) takes: 8 an element, 12 in half precision,
    with each parameter filled up to 64 elements.
    """
    return sum((12 if param.dtype in HALF else 8) * padded(local(param).numel()) for param in params)


def flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """All elements in the order of memory, one-dimensional; None where that is no view."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return None
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def same_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`flat(tensor)`, in the order that `like` has in memory; a copy where `tensor` has another."""
    if tensor.stride() != like.stride() and not (tensor.is_contiguous() and like.is_contiguous()):
        ordered = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)
        tensor = ordered.copy_(tensor)
    return flat(tensor)


@dataclass(eq=False)
class Arena:
    """
    Arguments:
        dtype (`torch.dtype`): of the parameters; half precision has masters.
        device (`torch.device`): of the parameters.
        streamed (`bool`): whether it is on the host and travels; else it is on `device`, and is updated there.
    """

    dtype: torch.dtype
    device: torch.device
    streamed: bool
    number: int
    numel: int = 0
    flats: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def half(self) -> bool:
        return self.dtype in HALF

    @property
    def kinds(self) -> tuple[str, ...]:
        return (*MOMENTS, "master") if self.half else MOMENTS

    @property
    def nbytes(self) -> int:
        return 4 * self.numel * len(self.kinds)

    def allocate(self, take: Callable[[int, Arena], torch.Tensor]) -> None:
        """`take(elements, arena)` returns float32 memory."""
        for kind in self.kinds:
            self.flats[kind] = take(self.numel, self).zero_()


@dataclass(eq=False)
class Entry:
    """
    A parameter's range in an arena, and what is known of it.

    Arguments:
        offset, numel (`int`): the range.
        fresh: the master is to be taken from the parameter at the next update.
        trusted: a master has been loaded: it holds whatever has happened to the parameter.
        seen: address and version that the parameter had when its master was right.
        shown: the state as the optimizer shows it, to notice what somebody has put there since.
        grad, grad_dtype, value, launch: of the step that is going on: the gradient (None where it has come down
            already) and the parameter, flat, and the numbers that the kernel takes.
    """

    param: torch.Tensor
    name: str
    arena: Arena
    offset: int
    numel: int
    fresh: bool = True
    trusted: bool = False
    seen: tuple[int, int] | None = None
    shown: dict[str, torch.Tensor] = field(default_factory=dict)
    step: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float32, device="cpu"))
    grad: torch.Tensor | None = None
    grad_dtype: torch.dtype = torch.float32
    value: torch.Tensor | None = None
    launch: tuple[Any, ...] = ()

    def state(self) -> dict[str, torch.Tensor]:
        """What the optimizer shows: `step`, `exp_avg`, `exp_avg_sq` and, for half precision, `master`; live."""
        views = {kind: self._view(self.arena.flats[kind]) for kind in self.arena.kinds}
        self.shown = {"step": self.step, **views}
        return dict(self.shown)

    def replaced(self, values: dict[str, Any]) -> bool:
        """Whether `values`, once `state()`, hold something else now."""
        return bool(self.shown) and any(values.get(key) is not tensor for key, tensor in self.shown.items())

    def fits(self, shard: torch.Tensor) -> bool:
        """Whether this place is still one for the parameter, of which this rank has `shard`."""
        return self.arena.device == shard.device and self.arena.dtype == shard.dtype and self.numel == shard.numel()

    def _view(self, memory: torch.Tensor) -> torch.Tensor:
        shard = local(self.param)
        # A storage of its own, which shares the slab's memory: what saves or copies the view takes no more than that,
        # and a DTensor's must begin at 0.
        storage = memory.untyped_storage()[4 * self.offset : 4 * (self.offset + self.numel)]
        view = memory.new_empty(0).set_(storage, 0, shard.shape, shard.stride())
        if not isinstance(self.param, DTensor):
            return view
        spec = self.param._spec
        meta = TensorMeta(self.param.shape, self.param.stride(), torch.float32)
        # Not from_local: it would move the shard to the mesh's device.
        return DTensor(view, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)

    def blank(self) -> None:
        """As before the first gradient."""
        for memory in self.arena.flats.values():
            memory[self.offset : self.offset + self.numel].zero_()
        self.step = torch.zeros((), dtype=torch.float32, device="cpu")
        self.fresh, self.trusted, self.seen = True, False, None

    def adopt(self, values: dict[str, Any]) -> None:
        """
        Copies a loaded state into the range, as float32. Without a master, that comes from the parameter. The values
        may be the range's own views.
        """
        self.step = torch.tensor(float(values["step"]), dtype=torch.float32, device="cpu")
        for kind in self.arena.kinds:
            if kind in values:
                local(self._view(self.arena.flats[kind])).copy_(local(values[kind]))
        self.fresh = "master" not in values
        self.trusted, self.seen = not self.fresh, None

    def version(self) -> tuple[int, int]:
        shard = local(self.param)
        return shard.data_ptr(), shard._version


def lay_out(
    params: Sequence[tuple[torch.Tensor, str]], streamed: Callable[[torch.device], bool], first: int
) -> tuple[list[Entry], list[Arena]]:
    """
    Arenas for parameters that have none, one for each dtype and device, with no memory yet.

    Arguments:
        params: (parameter, name) pairs.
        streamed: whether the state of parameters on a device is to travel.
        first: number of the first new arena.
    """
    arenas: dict[tuple[torch.dtype, torch.device], Arena] = {}
    entries = []
    for param, name in params:
        shard = local(param)
        key = shard.dtype, shard.device
        if key not in arenas:
            arenas[key] = Arena(*key, streamed(shard.device), first + len(arenas))
        entries.append(Entry(param, name, arenas[key], arenas[key].numel, shard.numel()))
        arenas[key].numel += padded(shard.numel())
    return entries, list(arenas.values())
