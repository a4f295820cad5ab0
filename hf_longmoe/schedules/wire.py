"""All communication of a schedule, as one injected object: who takes part, what is sent, what goes wrong."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import distributed

__all__ = ["GroupWire", "PeerError", "Pending", "Wire"]

_FAILED = "hf_longmoe/failed"  # in the group's own store: the message of the rank that failed first
# Its name up to torch 2.12.
_all_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
_LOOK_EVERY = 0.5  # seconds, while waiting, between two looks for that message


class PeerError(RuntimeError):
    """Another rank of the group failed inside a schedule; the message is its."""


class Pending:
    """
    What a collective will have received. `wait()` gives it, once; until then the sent tensor is kept alive.

    On an accelerator `wait` orders the current stream after the collective and returns at once.
    """

    def __init__(self, received: torch.Tensor, sent: torch.Tensor, wait: Callable[[], None]) -> None:
        self._received, self._sent, self._wait = received, sent, wait

    def wait(self) -> torch.Tensor:
        self._wait()
        received = self._received
        self._received = self._sent = self._wait = None  # the collective itself holds both tensors too
        return received


class Wire(Protocol):
    """
    What a schedule needs of the ranks it works with. Every rank must call the same methods in the same order.

    `sent_bytes` counts what this rank has sent to others.
    """

    rank: int
    size: int
    sent_bytes: int

    def gather(self, row: torch.Tensor) -> list[list[int]]:
        """A row of integers from every rank, `[n]` -> `[size][n]` on the host: a synchronisation."""

    def exchange(self, send: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> Pending:
        """All-to-all along the first dimension: `sent[r]` rows go to rank r, `received[r]` come from it."""

    def reduce(self, tensor: torch.Tensor, largest: bool = False) -> Pending:
        """The sum, or the largest, of every rank's `tensor`, element by element and in its place; the same on all."""

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Work that the other ranks wait for: an exception inside reaches them as a `PeerError`."""


class GroupWire:
    """
    A `Wire` over a process group of torch.distributed.

    A rank that fails between two collectives would leave the others waiting. So it leaves its message in the group's
    store; a host that waits for a collective looks there now and then. On an accelerator the host waits in `gather`
    only. A group on which a rank has failed cannot be used again.

    Arguments:
        group: a process group that this process is a member of.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.sent_bytes = 0

    def gather(self, row: torch.Tensor) -> list[list[int]]:
        rows = row.new_empty(self.size * len(row))
        self._await(_all_gather(rows, row.contiguous(), group=self.group, async_op=True))
        self.sent_bytes += row.nbytes * (self.size - 1)
        return rows.view(self.size, -1).tolist()

    def exchange(self, send: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> Pending:
        buffer = send.new_empty(sum(received), *send.shape[1:])
        work = distributed.all_to_all_single(
            buffer, send.contiguous(), list(received), list(sent), group=self.group, async_op=True
        )
        row = send[0].nbytes if send.shape[0] else 0
        self.sent_bytes += (sum(sent) - sent[self.rank]) * row
        wait = (lambda: self._await(work)) if send.device.type == "cpu" else work.wait
        return Pending(buffer, send, wait)

    def reduce(self, tensor: torch.Tensor, largest: bool = False) -> Pending:
        op = distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM
        work = distributed.all_reduce(tensor, op, group=self.group, async_op=True)
        self.sent_bytes += 2 * tensor.nbytes * (self.size - 1) // self.size  # what a ring of them sends
        wait = (lambda: self._await(work)) if tensor.device.type == "cpu" else work.wait
        return Pending(tensor, tensor, wait)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            message = f"rank {distributed.get_rank()}: {type(error).__name__}: {error}"
            with contextlib.suppress(Exception):  # the error itself matters more than that it could not be told
                store = self.group.get_group_store()
                if not store.check([_FAILED]):
                    store.set(_FAILED, message)
            raise

    def _await(self, work: distributed.Work) -> None:
        pause, looked = 20e-6, time.monotonic()
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
            if time.monotonic() - looked > _LOOK_EVERY:
                looked = time.monotonic()
                self._raise_if_failed(None)
        try:
            work.wait()
        except RuntimeError as error:  # the connection broke, perhaps because a rank that failed has gone
            self._raise_if_failed(error)
            raise

    def _raise_if_failed(self, cause: BaseException | None) -> None:
        try:
            store = self.group.get_group_store()
            message = store.get(_FAILED).decode() if store.check([_FAILED]) else None
        except Exception:  # the process that held the store has gone as well
            return
        if message is not None:
            raise PeerError(f"hf_longmoe stopped, since another rank failed. {message}") from cause
