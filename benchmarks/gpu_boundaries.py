"""SCO of `python -m benchmarks gpu`: Mixtral's layers, checkpointed, over one long sequence."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig, MixtralModel

from benchmarks.case import clear, step
from benchmarks.gpu_measure import DeviceProblem, engine_of
from hf_longmoe.config import BoundariesConfig
from hf_longmoe.integrations.accelerate.boundaries import install_boundaries
from hf_longmoe.peaks import StorageProbe
from hf_longmoe.peaks.allocator import AllocatorProbe
from hf_longmoe.peaks.region import tag

__all__ = ["LayersSizes"]


@dataclass(frozen=True, kw_only=True)
class LayersSizes:
    """
    bfloat16, `grouped_mm`, sdpa; without embedding and head.

    Arguments:
        tokens, hidden, width, experts, top_k, layers, heads (`int`): N (one sequence), H, I, E, k, L, attention heads.
        offload (`bool`): the baseline is `activation_checkpointing_enable(offload=True)`, else plain checkpointing.
        depth (`int`, defaults to 1): of our schedule.
    """

    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    layers: int
    heads: int
    offload: bool
    depth: int = 1

    @property
    def boundary(self) -> int:
        """Bytes of one."""
        return 2 * self.tokens * self.hidden

    def label(self) -> str:
        return (
            f"boundaries: Mixtral layers, L {self.layers}, N {self.tokens}, H {self.hidden}, I {self.width}, "
            f"E {self.experts}, k {self.top_k}, against {'offload=True' if self.offload else 'no offload'}"
        )

    def needs(self) -> tuple[int, int]:
        weights = self.layers * (3 * self.experts * self.width + 4 * self.hidden) * self.hidden
        layer = self.tokens * (20 * self.hidden + self.top_k * 6 * (self.hidden + self.width))
        kept = (self.layers + 4) * self.boundary
        # The gradients of a step, and three that are compared. Pinned memory of `offload=True`: powers of two.
        return 2 * (5 * weights + layer) + kept + 2**30, kept * 3

    def smaller(self) -> LayersSizes | None:
        if self.tokens > 4096:
            return replace(self, tokens=self.tokens // 2)
        return replace(self, width=self.width // 2) if self.width > 256 else None

    def _model(self) -> MixtralModel:
        config = MixtralConfig(
            vocab_size=8,  # unused
            pad_token_id=None,
            hidden_size=self.hidden,
            intermediate_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=max(1, self.heads // 4),
            num_local_experts=self.experts,
            num_experts_per_tok=self.top_k,
            max_position_embeddings=self.tokens,
        )
        model = MixtralModel._from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )
        model.embed_tokens.requires_grad_(False)
        return model.to(torch.get_default_device()).train()

    def build(self) -> DeviceProblem:
        torch.manual_seed(0)
        device = torch.get_default_device()
        engine, model = engine_of(device), self._model()
        x = torch.randn(1, self.tokens, self.hidden).to(torch.bfloat16).requires_grad_()
        upstream = torch.randn(1, self.tokens, self.hidden).to(torch.bfloat16)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # Of the same parameters, each with a checkpoint function of its own.
        plain, ours = (copy.deepcopy(model, {id(p): p for p in model.parameters()}) for _ in range(2))
        plain.activation_checkpointing_enable()
        ours.activation_checkpointing_enable()
        installed = install_boundaries(ours, BoundariesConfig(host_budget=None, depth=self.depth), engine)
        stock = plain
        if self.offload:
            stock = model
            _offload(stock, device)

        def run(which: MixtralModel) -> torch.Tensor:
            # Not `x` itself, which is alive anyway: as an embedding, the first boundary is the model's own.
            return which(inputs_embeds=x.clone(), use_cache=False).last_hidden_state

        def results(output: torch.Tensor) -> list[torch.Tensor]:
            return [output, x.grad, *(parameter.grad for parameter in parameters)]

        def reference() -> list[torch.Tensor]:
            output = run(plain)
            output.backward(upstream)
            return [tensor.detach().clone() for tensor in results(output)]

        def details() -> dict[str, Any]:
            offload, before = installed.offload, dict(installed.offload.sent)
            own = _boundaries_peak(problem, "ours", ours, device)
            payload = offload.offloaded * self.boundary
            return {
                "boundary_bytes": self.boundary,
                "boundaries_peak_bytes": own,
                "baseline_boundaries_peak_bytes": _boundaries_peak(problem, "baseline", stock, device),
                "boundaries_bound_bytes": (self.depth + 2) * self.boundary,
                "offloaded": offload.offloaded,
                "left": offload.left,
                "host_bytes": offload.host_bytes,
                "host_ratio": offload.host_bytes / payload if payload else 1.0,
                **{f"sent_{way}_bytes": count - before[way] for way, count in offload.sent.items()},
            }

        problem = DeviceProblem(
            [x, *parameters],
            upstream,
            lambda: run(stock),
            lambda: run(ours),
            reference,
            details=details,
            compared=lambda side, output: results(output),
            against="the same step with plain checkpointing, once more",
            bitwise=True,
            close=installed.remove,
        )
        return problem


def _offload(model: MixtralModel, device: torch.device) -> None:
    if device.type != "cpu":
        model.activation_checkpointing_enable(offload=True)
        return

    def without_pinning(function: Any, *args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=False):
            return checkpoint(function, *args, **kwargs)

    # A machine without an accelerator has no pinned memory.
    model._set_gradient_checkpointing(True, partial(without_pinning, use_reentrant=False))


def _boundaries_peak(problem: DeviceProblem, side: str, model: MixtralModel, device: torch.device) -> int:
    """Bytes of the layers' inputs that are on the device at once, at most. A step, without its time."""

    def count(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        tag("boundaries", args[0])

    handles = [layer.input_layernorm.register_forward_pre_hook(count) for layer in model.layers]
    probe = StorageProbe() if device.type == "cpu" else AllocatorProbe(device=device)
    try:
        with probe:
            output = step(problem, side)
            del output
            clear(problem)
        return probe.report().components["boundaries"].peak
    finally:
        for handle in handles:
            handle.remove()
