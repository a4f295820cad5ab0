"""The attention of one model whose ranks share sequences: ringmaster's Ulysses around the model's own kernel.

Ulysses gives each rank a part of the heads and all of the sequence for the time of the kernel, so that the kernel is
the model's own and its result is exact. ringmaster finds its groups in a setting of the whole process, which is set
here for each call alone. Outside of a shared forward, and for a model that generates, the model's kernel runs as it
would without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from ringmaster.runtime import CPRuntime, maybe_runtime, set_runtime
from ringmaster.strategies.ulysses import make_ulysses_attention
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_longmoe.schedules.replay import recall, replaying

__all__ = ["SequenceAttention"]


class SequenceAttention:
    """
    An entry of Transformers' attention and mask interfaces, under a name of its own, until `close()`.

    Arguments:
        kernel: the name of the model's attention implementation.
    """

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.name = f"longmoe_sequences_{id(self):x}"
        self.calls = 0  # of attention layers, in this forward
        self._current: CPRuntime | None = None
        self._ulysses = make_ulysses_attention(kernel)
        AttentionInterface.register(self.name, self._attend)
        AttentionMaskInterface.register(self.name, self._mask)

    def close(self) -> None:
        AttentionInterface._global_mapping.pop(self.name, None)
        AttentionMaskInterface._global_mapping.pop(self.name, None)

    def begin(self, runtime: CPRuntime) -> None:
        """From here to `end()` the tokens are a part of a sequence; `runtime` says of which ranks and documents."""
        self._current, self.calls = runtime, 0

    def end(self) -> None:
        self._current = None

    def _mask(self, *args: Any, config: PreTrainedConfig | None = None, **kwargs: Any) -> torch.Tensor | None:
        """
        In a shared forward no mask is made, since the kernel is causal by itself: only the size of a sliding window
        goes with the layers that have one, as a tensor of one number on the host.
        """
        if self._current is None:
            return ALL_MASK_ATTENTION_FUNCTIONS[self.kernel](*args, config=config, **kwargs)
        window = kwargs.get("local_size")
        if kwargs.get("use_vmap") or (window is None and kwargs.get("mask_function") is not causal_mask_function):
            raise ValueError(
                "ParallelismConfig.cp_size: the model's attention is masked in a way that ranks that share a sequence"
                " do not know: neither causal nor a sliding window; set cp_size to 1."
            )
        return None if window is None else torch.tensor([window])

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Arguments:
            query: `[B, heads, S, d]`; key: `[B, kv heads, S, d]`; value: `[B, kv heads, S, v]`; of this rank's tokens.
            attention_mask: what `_mask` has given.

        Returns:
            `[B, S, heads, v]`, and no weights.
        """
        # A replay in backward belongs to its own forward, whatever has run since.
        runtime = recall(lambda: self._current, shared=True)
        if runtime is None:
            with _named(module.config, self.kernel):
                return ALL_ATTENTION_FUNCTIONS[self.kernel](module, query, key, value, attention_mask, **kwargs)
        if not replaying():
            self.calls += 1
        kwargs["sliding_window"] = _window(module, attention_mask, kwargs)
        for name in ("s_aux", "position_bias"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"ParallelismConfig.cp_size: {type(module).__name__} gives its attention `{name}`, which Ulysses"
                    " does not divide by heads; set cp_size to 1."
                )
        kwargs.pop("position_ids", None)  # this rank's, and the kernel is about to see all tokens
        width, widest = value.shape[-1], max(query.shape[-1], value.shape[-1])
        if query.shape[-1] != width:  # ringmaster sends them together
            if kwargs.get("scaling") is None:
                kwargs["scaling"] = query.shape[-1] ** -0.5
            query, key, value = (F.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
        with _running(runtime):
            out, _ = self._ulysses(module, query, key, value, None, **kwargs)
        return out[..., :width], None


def _window(module: nn.Module, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> int | None:
    """The layer's sliding window by its mask, which the layer itself must know too."""
    by_mask = None if mask is None else int(mask)
    by_layer = kwargs.get("sliding_window") or getattr(module, "sliding_window", None)
    if by_mask != by_layer:
        raise ValueError(
            f"ParallelismConfig.cp_size: {type(module).__name__} has a sliding window of {by_layer}, and a mask for"
            f" {by_mask}; set cp_size to 1."
        )
    return by_mask


@contextlib.contextmanager
def _running(runtime: CPRuntime) -> Iterator[None]:
    before = maybe_runtime()
    set_runtime(runtime)
    try:
        yield
    finally:
        set_runtime(before)


@contextlib.contextmanager
def _named(config: PreTrainedConfig, kernel: str) -> Iterator[None]:
    """Kernels look there for which one they are."""
    before = config._attn_implementation_internal
    config._attn_implementation_internal = kernel
    try:
        yield
    finally:
        config._attn_implementation_internal = before
