"""Tiles of tokens for the dense parts of a layer (shared experts, dense MLPs), under the dispatch budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_longmoe.schedules.dispatch.clone import clone_as_it_is
from hf_longmoe.schedules.dispatch.plan import rows
from hf_longmoe.schedules.nodes import save_and_run
from hf_longmoe.schedules.numerics import accumulation_dtype
from hf_longmoe.schedules.rehearsal import each

__all__ = ["TokenTiles"]


@dataclass(frozen=True)
class TokenTiles:
    """
    Runs a module that treats each token by itself, in tiles: `tiles(module, x)`.

    Backward runs each tile through autograd; weight gradients are summed over the tiles in at least float32.

    Arguments:
        budget: bytes beside the module's input, output, parameters and their gradients. One set of the parameters'
            gradients, in at least float32, comes on top: a tile's own, before it is added.
        output_saved_after: as in `LocalDispatch`.
    """

    budget: int
    output_saved_after: bool = True

    def __call__(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """
        Arguments:
            module: its class's `forward` maps `[..., H]` to `[..., H]`, each token by itself, deterministically.
            x: `[..., H]`.

        Raises:
            `ValueError`: the budget is below a tile of a few tokens.
        """
        named = dict(module.named_parameters())
        call = _Call(self, module, tuple(named), self.tokens(module, x))
        return save_and_run(call, x.reshape(-1, x.shape[-1]), *named.values()).view(x.shape)

    def tokens(self, module: nn.Module, x: torch.Tensor) -> int:
        """Tokens of a tile at most."""
        return rows(self.budget, self.bytes_per_token(module, x))

    @staticmethod
    def bytes_per_token(module: nn.Module, x: torch.Tensor) -> int:
        """A token's input, output and their gradients; each product, its activation, and the gradients of both."""
        widths = [p.shape[0] for p in module.parameters() if p.dim() == 2]
        return (4 * x.shape[-1] + 3 * sum(widths)) * x.element_size()


class _Call:
    def __init__(self, tiles: TokenTiles, module: nn.Module, names: Sequence[str], size: int) -> None:
        self.output_saved_after = tiles.output_saved_after
        self.module, self.names, self.size = clone_as_it_is(module), names, size

    def _run(self, x: torch.Tensor, params: Sequence[torch.Tensor]) -> torch.Tensor:
        device = x.device.type
        # Each tile of a backward has leaves of its own: autocast's cache would keep a cast copy of every tile's.
        with torch.autocast(
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            cache_enabled=False,
        ):
            return torch.func.functional_call(self.module, dict(zip(self.names, params, strict=True)), (x,))

    def tiles(self, tokens: int) -> Iterable[slice]:
        tiles = [slice(start, min(start + self.size, tokens)) for start in range(0, tokens, self.size)]
        return each(tiles, kind=lambda tile: tile.stop - tile.start)

    def prepare(self, x: torch.Tensor, *params: torch.Tensor) -> None:
        pass

    def forward(self, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for tile in self.tiles(x.shape[0]):
            out[tile] = self._run(x[tile], params)
        return out

    def backward(self, g: torch.Tensor, needs: Sequence[bool], x: torch.Tensor, *params: torch.Tensor):
        grad_x = torch.empty_like(x) if needs[0] else None
        grads = [
            torch.zeros_like(p, dtype=accumulation_dtype(p.dtype)) if n else None
            for p, n in zip(params, needs[1:], strict=True)
        ]
        for tile in self.tiles(x.shape[0]):
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_(n) for t, n in zip((x[tile], *params), needs, strict=True)]
                y = self._run(leaves[0], leaves[1:])
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(y, wanted, g[tile], allow_unused=True, materialize_grads=True))
            if needs[0]:
                grad_x[tile] = next(found)
            for grad in grads:
                if grad is not None:
                    grad.add_(next(found))
            del found, wanted, leaves, y  # before the next tile makes its own
        return grad_x, *(g if g is None else g.to(p.dtype) for g, p in zip(grads, params, strict=True))
