"""How a tensor becomes one flat run of memory that can travel, and the tensor again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Layout", "lay_flat"]

_MOST_GAPS = 1.02  # of the payload: what lies between its elements travels too


@dataclass(frozen=True)
class Layout:
    """Shape and stride of a (local) tensor; `sharding`: mesh, placements, whole shape and stride of a `DTensor`."""

    shape: torch.Size
    stride: tuple[int, ...]
    sharding: tuple[Any, ...] | None = None

    def restore(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor whose memory begins where `flat` does, in its shape, strides and sharding; not a copy."""
        with torch.no_grad():
            local = flat.as_strided(self.shape, self.stride, flat.storage_offset())
            if self.sharding is None:
                return local
            from torch.distributed.tensor import DTensor  # slow to import; there is one, so it has been

            mesh, placements, shape, stride = self.sharding
            return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def lay_flat(tensor: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Layout] | None:
    """
    The memory of `tensor`, from its first element to its last, one-dimensional and outside of any graph; and how to
    make the tensor of such memory. Dense tensors in any order of dimensions, expanded ones, and `DTensor`.

    None where it cannot travel: not on `device`, empty, more than 2% of gaps, or of a class unknown here.
    """
    sharding = None
    with torch.no_grad():
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            if not torch.distributed.is_available():
                return None
            from torch.distributed.tensor import DTensor

            if type(tensor) is not DTensor:
                return None
            sharding = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
            tensor = tensor.to_local()
            if type(tensor) is not torch.Tensor:
                return None
        if tensor.layout != torch.strided or tensor.device != device or tensor.is_inference() or tensor.numel() == 0:
            return None
        if tensor.is_nested or tensor.is_neg() or tensor.is_conj():
            return None
        shape, stride = tensor.shape, tensor.stride()
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        if extent > _MOST_GAPS * math.prod(n for n, s in zip(shape, stride, strict=True) if s):
            return None
        flat = tensor.detach().as_strided((extent,), (1,), tensor.storage_offset())
    return flat, Layout(shape, stride, sharding)
