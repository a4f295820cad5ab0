"""`BoundaryOffload`: the inputs of a model's checkpointed layers wait for backward in host memory.

It knows checkpoint functions only by what they do with a layer's input: save it, under autograd's hooks for saved
tensors. Which layers are checkpointed, and by what function, is the integration's affair.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hf_longmoe.schedules.boundaries.layout import lay_flat
from hf_longmoe.schedules.boundaries.piece import Carrier, Piece
from hf_longmoe.schedules.boundaries.saved import Boundary, Forward, Pack, unpack
from hf_longmoe.schedules.host import Engine, HostBudget, HostPool, check_host_memory
from hf_longmoe.sizes import format_bytes

__all__ = ["BoundaryOffload"]


class BoundaryOffload:
    """
    Selective checkpoint offload (SCO) of one model.

    Forward: a boundary travels to host memory while its layer runs; the last one stays, since backward begins with it.
    Backward: while a layer is replayed, the boundaries of the `depth` layers before it travel back. At most depth + 1
    boundaries are on the device, with the output of the layer that is running; depth + 2 while it is not known which
    one is the last (see `begin`).

    Gradients are bitwise those of a model whose boundaries stay on the device.

    Arguments:
        engine (`Engine`, *optional*): does the copies; None: nothing is done (the model's memory is the host's).
        host_budget (`int`, *optional*):
            Bytes of host memory, at most; boundaries beyond it stay on the device. Unlimited by default.
        depth (`int`, defaults to 1): copies under way at once, in each direction.
        restored (callable, *optional*): is given each tensor that is brought back, when its memory is made.

    Raises:
        `ValueError`: `depth` is below 1, or `host_budget` negative.

    ```py
    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> from hf_longmoe.schedules.host import FakeEngine
    >>> x, engine = torch.randn(2, 3, requires_grad=True), FakeEngine()
    >>> with BoundaryOffload(engine) as offload:
    ...     offload.begin(count=3)
    ...     y = x
    ...     for layer in (torch.sin, torch.tanh, torch.exp):
    ...         y = offload.checkpoint(checkpoint, layer, y, use_reentrant=False)
    ...     y.sum().backward()
    ...     offload.offloaded, offload.sent
    (2, {'down': 48, 'up': 48})

    ```
    """

    def __init__(
        self,
        engine: Engine | None,
        *,
        host_budget: int | None = None,
        depth: int = 1,
        restored: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth} copies under way at once must be at least 1.")
        if host_budget is not None and host_budget < 0:
            raise ValueError(f"host_budget={host_budget} must be a number of bytes, or None for no limit.")
        self.engine, self.depth = engine, depth
        self._forward = Forward(0)
        self._under_way: deque[weakref.ref[Boundary]] = deque()  # sent, and still on the device
        self._thread = threading.local()
        if engine is not None:
            self._carrier = Carrier(engine, restored)
            self._budget = HostBudget(host_budget)
            self._inputs, self._kept = HostPool(engine, self._budget), HostPool(engine, self._budget)
            self._checkpoint = torch.compiler.disable(_checkpoint)
            weakref.finalize(self, self._carrier.abandon, self._inputs, self._kept).atexit = False

    def __reduce__(self) -> tuple:
        """A copy, as of a model that is copied or saved whole, offloads nothing: its host memory would be another."""
        return BoundaryOffload, (None,)

    # -- what it has done --------------------------------------------------------------------------------------------
    @property
    def host_bytes(self) -> int:
        """Host memory that it has taken, in use or not."""
        return 0 if self.engine is None else self._inputs.nbytes + self._kept.nbytes

    @property
    def offloaded(self) -> int:
        """Boundaries of the last forward that went to host memory."""
        return self._forward.offloaded

    @property
    def left(self) -> int:
        """Boundaries of the last forward that stayed on the device; its last one is among them."""
        return len(self._forward.boundaries) - self._forward.offloaded

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that copies were begun for, `"down"` to the host and `"up"` to the device."""
        return {"down": 0, "up": 0} if self.engine is None else dict(self._carrier.sent)

    # -- forward -----------------------------------------------------------------------------------------------------
    def begin(self, count: int | None = None) -> None:
        """
        A new forward of the model begins. Does nothing in one that builds no graph, or in a replay.

        Arguments:
            count (`int`, *optional*):
                How many boundaries it will have; by default as many as the forward before. The last stays on the
                device. A wrong count costs a copy, or has one more boundary on the device.
        """
        if not self._applies() or torch._C._current_graph_task_id() != -1:
            return
        with self._carrier.locked():
            before = self._forward
            newest = before.newest()
            if newest is not None and newest.waits:  # its backward has not begun
                self._send_late(newest)
            expected = count if count is not None else len(before.boundaries) or before.expected
            self._forward = Forward(expected)

    def checkpoint(self, function: Callable, region: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """
        `function(region, *args, **kwargs)`, a checkpointed call of one layer, whose boundary is offloaded: the first
        tensor of floating point in `args`. It need not require a gradient. Other tensors pass through.

        Arguments:
            function: a checkpoint function: `torch.utils.checkpoint.checkpoint`, reentrant or not, or like it.
            region: the layer.

        Raises:
            `RuntimeError`: in backward, where the boundary was changed in place before its copy had ended.
        """
        if not self._applies():
            return function(region, *args, **kwargs)
        return self._checkpoint(self, function, region, args, kwargs)

    def store(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """
        Offloads what a layer keeps for its replay together with its boundary. To be called in the first pass of a
        layer that runs in `checkpoint`; the caller must hold on to what is returned, and not to `tensor`.

        Returns:
            What gives the tensor back, on the device, in a replay.
        """
        boundary = getattr(self._thread, "boundary", None)
        laid = None if boundary is None else lay_flat(tensor, self.engine.device)
        if laid is None:
            return lambda: tensor
        with self._carrier.locked():
            piece = Piece(self._carrier, self._kept, *laid)
            boundary.pieces.append(piece)
            if boundary.sent and piece.send() and all(ref() is not boundary for ref in self._under_way):
                self._under_way.append(weakref.ref(boundary))
        return partial(self._hand_out, piece)

    def _applies(self) -> bool:
        return (
            self.engine is not None
            and not self._carrier.closed
            and torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
        )

    def _arrive(self, laid: tuple) -> Boundary:
        with self._carrier.locked():
            piece = Piece(self._carrier, self._inputs, *laid)
            if torch._C._current_graph_task_id() != -1:  # a checkpoint within a layer's replay: wanted at once
                boundary = Boundary(Forward(0), piece, self._unpack)
                boundary.waits = False
                return boundary
            forward = self._forward
            boundary, newest = Boundary(forward, piece, self._unpack), forward.newest()
            if newest is not None and newest.waits:
                self._send_late(newest)
            else:
                self._retire(self.depth - 1)
            forward.boundaries.append(weakref.ref(boundary))
            if boundary.at + 1 < forward.expected:
                self._send(boundary)
            return boundary

    def _send_late(self, boundary: Boundary) -> None:
        self._retire(self.depth - 1)
        self._send(boundary)

    def _send(self, boundary: Boundary) -> None:
        boundary.waits = False
        boundary.sent = boundary.pieces[0].send()
        if boundary.sent:
            boundary.forward.offloaded += 1
            self._under_way.append(weakref.ref(boundary))
            for piece in boundary.pieces[1:]:
                piece.send()

    def _retire(self, most: int) -> None:
        living = [ref for ref in self._under_way if ref() is not None]
        self._under_way = deque(living)
        while len(self._under_way) > most:
            boundary = self._under_way.popleft()()
            for piece in boundary.pieces if boundary is not None else ():
                piece.retire()

    # -- backward ----------------------------------------------------------------------------------------------------
    def _unpack(self, boundary: Boundary) -> torch.Tensor:
        with self._carrier.locked():
            for piece in boundary.pieces:
                piece.fetch()
            chain = boundary.forward.boundaries
            for ref in reversed(chain[max(boundary.at - self.depth, 0) : boundary.at]):
                earlier = ref()
                for piece in earlier.pieces if earlier is not None else ():
                    piece.fetch()
            return boundary.pieces[0].hand_out()

    def _hand_out(self, piece: Piece) -> torch.Tensor:
        with self._carrier.locked():
            return piece.hand_out()

    # -- host memory -------------------------------------------------------------------------------------------------
    def reserve(self, nbytes: int, count: int, ranks: int = 1) -> None:
        """
        Takes host memory for `count` boundaries of `nbytes` bytes each, as far as the budget goes. Without it, it is
        taken as boundaries come.

        Arguments:
            ranks (`int`, defaults to 1): processes of this machine that take as much.

        Raises:
            `MemoryError`: the machine does not have it; the message has the bytes that are needed and those there.
        """
        if self.engine is None or nbytes == 0:
            return
        with self._carrier.locked():
            if self._budget.limit is not None:
                count = min(count, self._budget.limit // nbytes)
            needed = max(count * nbytes - self._inputs.nbytes, 0)
            check_host_memory(needed, f"Offloading {count} checkpoint boundaries of {format_bytes(nbytes)}", ranks)
            slabs = []
            try:
                while len(slabs) < count and (slab := self._inputs.take(nbytes)) is not None:
                    slabs.append(slab)
            finally:
                for slab in slabs:
                    self._inputs.give(slab)

    def close(self) -> None:
        """
        Frees the host memory that is idle, and later the rest, as the graphs that use it go: backward can still be run
        through them. Calls of `checkpoint` from here on offload nothing.
        """
        if self.engine is None:
            return
        with self._carrier.locked():
            self._retire(0)
            self._carrier.closed = True
            self._inputs.close()
            self._kept.close()

    def __enter__(self) -> BoundaryOffload:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    @contextmanager
    def _current(self, boundary: Boundary) -> Iterator[None]:
        before = getattr(self._thread, "boundary", None)
        self._thread.boundary = boundary
        try:
            yield
        finally:
            self._thread.boundary = before


def _checkpoint(offload: BoundaryOffload, function: Callable, region: Callable, args: tuple, kwargs: dict) -> Any:
    tensor = next((arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()), None)
    laid = None if tensor is None else lay_flat(tensor, offload.engine.device)
    if laid is None:
        return function(region, *args, **kwargs)
    boundary = offload._arrive(laid)
    pack = Pack(tensor, boundary)
    del laid
    try:
        with offload._current(boundary), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return function(region, *args, **kwargs)
    finally:
        pack.tensor = pack.boundary = None
