"""PipelinedLLEP: the experts of a block spread over ranks, their rows exchanged in waves under a byte budget, exact.

One gather of counts tells every rank the whole plan (`exchange.py`): which rows go where in which wave. Then

    forward   D0  D1 C0  D2 C1  ...      D: rows to the experts' ranks, C: outputs back; wave 0 computes while D1 runs
    backward  the same with [x | output gradient | routing weight] out and [gradient of x | of the weight] back

A wave's buffers are gone before the one after the next arrives, so memory does not grow with tokens, ranks or skew.
Where ranks are loaded unevenly, experts are lent (least-loaded expert parallelism): their weights travel just ahead of
the waves that use them, and their gradients go home as soon as those end.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_longmoe.schedules.dispatch.blocks import Block, row_slices
from hf_longmoe.schedules.dispatch.foreign import Lending
from hf_longmoe.schedules.dispatch.gradients import WeightGradients
from hf_longmoe.schedules.dispatch.layout import Tile, gather_rows, tiles, write_rows
from hf_longmoe.schedules.dispatch.plan import Segment, Wave
from hf_longmoe.schedules.dispatch.routing import Routed, Routing, route
from hf_longmoe.schedules.dispatch.sizes import PipelineSizes
from hf_longmoe.schedules.nodes import save_and_run
from hf_longmoe.schedules.numerics import accumulation_dtype
from hf_longmoe.schedules.replay import recall
from hf_longmoe.schedules.wire import Pending, Wire

__all__ = ["PipelinedDispatch"]


@dataclass(frozen=True)
class PipelinedDispatch:
    """
    Runs a block's experts over the ranks of a wire: `schedule(x, top_k_index, top_k_weights, block, params)`.

    Every rank must make the same calls in the same order, also one that has no tokens.

    Arguments:
        wire: to the ranks among which the experts are divided, rank r having the r-th part of them.
        sizes: what the budget buys; see `pipeline_sizes`.
        output_saved_after: as in `LocalDispatch`.
        on_routing: called once a forward with the `Routing`, to report it.
    """

    wire: Wire
    sizes: PipelineSizes
    output_saved_after: bool = True
    on_routing: Callable[[Routing], None] | None = None

    def __call__(
        self,
        x: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        block: Block,
        params: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """
        Arguments:
            x: this rank's tokens, `[T, H]`; T may differ from rank to rank, and be 0.
            top_k_index: experts of each token, `[T, k]`, global ids; one that is no expert's is left out.
            top_k_weights: routing weights, `[T, k]`.
            block: how a tile's experts run.
            params: this rank's experts; the same shapes on every rank. Rows travel in the first one's dtype, which is
                stacked. One that is not (a norm all experts share) has the same values on every rank, and gets this
                rank's part of its gradient: their sum is the caller's to take.

        Returns:
            `[T, H]`, in the dtype of `x`: the sum over slots of weight times output, summed in at least float32.

        Raises:
            `ValueError`: the ranks' budgets, shapes or dtypes differ; on every rank.
            `PeerError`: another rank failed.
        """
        trains = any(param.requires_grad for param in params)
        return save_and_run(_Call(self, block, trains), x, top_k_weights, top_k_index, *params)


class _Call:
    """One call of one layer (see `schedules.nodes`); `routing` pins where its rows go, in integers."""

    def __init__(self, schedule: PipelinedDispatch, block: Block, trains: bool) -> None:
        self.schedule, self.block, self.trains = schedule, block, trains
        self.wire, self.sizes = schedule.wire, schedule.sizes
        self.output_saved_after = schedule.output_saved_after
        self.routing: Routing

    def prepare(self, x: torch.Tensor, w: torch.Tensor, index: torch.Tensor, *params: torch.Tensor) -> None:
        def choose() -> Routing:
            found = route(self.wire, self.sizes, index, x, params, self.trains)
            if self.schedule.on_routing is not None:
                self.schedule.on_routing(found)
            return found

        # A replay does not ask the other ranks again; nor could its routing be another.
        self.routing = recall(choose)

    # -- forward -----------------------------------------------------------------------------------------------------
    def forward(self, x: torch.Tensor, w: torch.Tensor, index: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        total = accumulation_dtype(x.dtype)
        with self.wire.together():
            orders = self.routing.orders(index)
            out = torch.zeros_like(x)
            for routed, order in zip(self.routing.blocks, orders, strict=True):
                part = out[routed.tokens]
                sums = part if total == x.dtype else torch.zeros_like(part, dtype=total)
                given = x[routed.tokens], w[routed.tokens].reshape(-1).to(total), order
                self._forward(routed, given, params, sums)
                if sums is not part:
                    part.copy_(sums)
        return out

    def _forward(self, routed: Routed, given: Any, params: Any, out: torch.Tensor) -> None:
        x, w, order = given
        lending = Lending(self.wire, routed.plan, params, self.block.stacked)

        def issue(wave: int) -> tuple:
            rows = routed.rows(order, self.wire.rank, wave)
            token = rows // routed.k
            fetched = lending.fetch(wave, params)
            send = params[0].new_empty(len(rows), x.shape[1])
            for s in row_slices(*send.shape):
                send[s] = x.index_select(0, token[s])
            return rows, fetched, self._exchange(routed, wave, send, home=False)

        def compute(wave: int, issued: tuple) -> tuple:
            rows, fetched, arriving = issued
            lending.arrive(fetched)
            buffer = arriving.wait()
            for tile in self._tiles(routed, wave):
                experts, base = self._experts(tile, routed, lending, params)
                segments = _segments(tile, base, lambda expert: (True, True))
                result = self.block.forward(gather_rows(buffer, tile.parts), segments, experts)
                write_rows(buffer, tile.parts, result)
                del result, experts
            lending.drop(wave)
            return rows, self._exchange(routed, wave, buffer, home=True)

        def land(computed: tuple) -> None:
            rows, returning = computed
            values, token = returning.wait(), rows // routed.k
            weight = w.index_select(0, rows)
            for s in row_slices(*values.shape):
                out.index_add_(0, token[s], values[s].to(out.dtype).mul(weight[s, None]))

        _pipeline(routed.plan.num_waves, self.sizes.caps.depth, issue, compute, land)

    # -- backward ----------------------------------------------------------------------------------------------------
    def backward(
        self,
        g: torch.Tensor,
        needs: Sequence[bool],
        x: torch.Tensor,
        w: torch.Tensor,
        index: torch.Tensor,
        *params: torch.Tensor,
    ):
        total = accumulation_dtype(x.dtype)
        # Half precision: float32 while it fits, else the model's dtype, in which stock kernels add a token's slots.
        wide = self.sizes.token_block is None or x.shape[0] <= self.sizes.token_block
        routed = self.routing.whole
        with self.wire.together():
            order = self.routing.order(index)
            grad_x = torch.zeros_like(x, dtype=total if wide else x.dtype) if needs[0] else None
            grad_w = torch.zeros(w.numel(), dtype=total, device=w.device)
            grads = WeightGradients(
                params,
                needs[3:],
                self.block.stacked,
                [routed.totals[expert] for expert in routed.home],
                max_open=self.sizes.max_open,
            )
            carried = w.reshape(-1).to(torch.promote_types(total, params[0].dtype))  # at least as wide as a column
            self._backward(routed, (x, g, carried, order), params, (grad_x, grad_w, grads), needs[3:])
            return (
                None if grad_x is None else grad_x.to(x.dtype),
                grad_w.view_as(w).to(w.dtype) if needs[1] else None,
                None,
                *grads.finish(params),
            )

    def _backward(self, routed: Routed, given: Any, params: Any, into: Any, wanted: Sequence[bool]) -> None:
        x, g, w, order = given
        grad_x, grad_w, grads = into
        plan, rank, hidden, dtype = routed.plan, self.wire.rank, x.shape[1], params[0].dtype
        bits = w.itemsize // dtype.itemsize  # columns that carry a routing weight, or its gradient, bit for bit
        lending = Lending(self.wire, plan, params, self.block.stacked, wanted)
        contributions = _Contributions(self._contributions(routed))

        def issue(wave: int) -> tuple:
            rows = routed.rows(order, rank, wave)
            token = rows // routed.k
            fetched = lending.fetch(wave, params)
            send = params[0].new_empty(len(rows), 2 * hidden + bits)
            for s in row_slices(*send.shape):
                send[s, :hidden] = x.index_select(0, token[s])
                send[s, hidden : 2 * hidden] = g.index_select(0, token[s])
            send[:, 2 * hidden :] = w.index_select(0, rows)[:, None].view(dtype)
            return rows, fetched, self._exchange(routed, wave, send, home=False)

        def compute(wave: int, issued: tuple) -> tuple:
            rows, fetched, arriving = issued
            lending.arrive(fetched)
            buffer = arriving.wait()
            back = buffer.new_empty(buffer.shape[0], hidden + bits)
            for tile in self._tiles(routed, wave):
                experts, base = self._experts(tile, routed, lending, params)
                own = tile.first in routed.home or not self.trains  # frozen experts have no gradients to keep
                sums = grads if own else lending.gradients(tile.first, grads)
                weight = gather_rows(buffer[:, 2 * hidden :], tile.parts).view(w.dtype)[:, 0]
                rows_x = gather_rows(buffer[:, :hidden], tile.parts)
                rows_g = gather_rows(buffer[:, hidden : 2 * hidden], tile.parts)
                segments = _segments(tile, base, contributions.next)
                rows_x, rows_w = self.block.backward(rows_x, rows_g, weight, segments, experts, sums)
                del rows_g
                write_rows(back[:, :hidden], tile.parts, rows_x)
                write_rows(back[:, hidden:], tile.parts, rows_w.to(w.dtype)[:, None].view(dtype))
                del rows_x, experts
            del buffer
            lending.drop(wave)
            returning = self._exchange(routed, wave, back, home=True)
            return rows, returning, lending.send_home(wave, back) if self.trains else None

        def land(computed: tuple) -> None:
            rows, returning, coming = computed
            values, token = returning.wait(), rows // routed.k
            for s in row_slices(*values.shape) if grad_x is not None else ():
                grad_x.index_add_(0, token[s], values[s, :hidden].to(grad_x.dtype))
            weights = values[:, hidden:].contiguous().view(w.dtype)[:, 0]
            grad_w.index_copy_(0, rows.long(), weights.to(grad_w.dtype))
            for expert, found in lending.come_home(coming) if coming is not None else ():
                segment = Segment(expert - routed.home.start, 0, 0, *contributions.next(expert))
                for i, value in enumerate(found):
                    if value is not None:
                        grads.add(i, segment, value)

        _pipeline(plan.num_waves, self.sizes.caps.depth, issue, compute, land)

    # -- both --------------------------------------------------------------------------------------------------------
    def _tiles(self, routed: Routed, wave: int) -> Iterator[Tile]:
        rank, plan = self.wire.rank, routed.plan
        rows, splits = plan.receives(rank, wave), plan.receive_splits(rank, wave)
        return tiles(rows, splits, self.sizes.tile, self.sizes.span, routed.home)

    def _experts(self, tile: Tile, routed: Routed, lending: Lending, params: Any) -> tuple[Any, int]:
        """The parameters that a tile runs on, stacked, and the global id of the first of them."""
        if tile.first in routed.home:
            return params, routed.home.start
        return lending.weights(tile.first, params), tile.first

    def _contributions(self, routed: Routed) -> Iterator[int]:
        """Each expert once for each time that something is added to its weight gradients."""
        for wave in range(routed.plan.num_waves):
            yield from (expert for tile in self._tiles(routed, wave) for expert, _ in tile.experts)
            yield from (expert for _, expert in routed.plan.returns(self.wire.rank, wave))

    def _exchange(self, routed: Routed, wave: int, send: torch.Tensor, home: bool) -> Pending:
        there = routed.plan.send_splits(self.wire.rank, wave)
        here = routed.plan.receive_splits(self.wire.rank, wave)
        return self.wire.exchange(send, there, here) if home else self.wire.exchange(send, here, there)


class _Contributions:
    """Which contribution to an expert's weight gradients is its first, and which its last."""

    def __init__(self, experts: Iterator[int]) -> None:
        self.left, self.begun = Counter(experts), set()

    def next(self, expert: int) -> tuple[bool, bool]:
        self.left[expert] -= 1
        first, last = expert not in self.begun, not self.left[expert]
        self.begun.add(expert)
        return first, last


def _segments(tile: Tile, base: int, flags: Callable[[int], tuple[bool, bool]]) -> Wave:
    segments, start = [], 0
    for expert, rows in tile.experts:
        segments.append(Segment(expert - base, start, start + rows, *flags(expert)))
        start += rows
    return Wave(tuple(segments))


def _pipeline(waves: int, depth: int, issue: Callable, compute: Callable, land: Callable) -> None:
    """
    `issue(wave)` runs `depth` waves ahead of `compute(wave, issued)`, and `land(computed)` one behind it, so that what
    the first two have sent travels meanwhile. Nothing of a wave is kept here once it has landed.
    """
    ahead = deque(issue(wave) for wave in range(min(depth, waves)))
    behind = None
    for wave in range(waves):
        if wave + depth < waves:
            ahead.append(issue(wave + depth))
        computed = compute(wave, ahead.popleft())
        if behind is not None:
            land(behind)
        behind = computed
    if behind is not None:
        land(behind)
