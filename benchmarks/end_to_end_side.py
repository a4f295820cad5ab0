"""
One side of the end-to-end benchmark on this rank: a model, its optimizer, and steps of them.

The device is made of host memory, so that what is offloaded must be told apart: it lies in memory of the interpreter
(`bytearray`), which the probe does not see, while what travels back is an ordinary tensor, which it does. This is so
for our schedules (`FakeEngine`) and for Transformers' own offloading of activations alike.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import distributed
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from hf_longmoe import DispatchConfig, LongMoEConfig, OptimizerConfig, VocabConfig, patch_model
from hf_longmoe.integrations.accelerate.boundaries import install_boundaries
from hf_longmoe.integrations.transformers.regions import watch
from hf_longmoe.peaks import StorageProbe
from hf_longmoe.schedules.host import FakeEngine
from hf_longmoe.schedules.optimizer import OffloadStreamAdamW

__all__ = ["SCHEDULES", "EndToEndModel", "Peak", "Side", "SideSizes", "caps_of"]

SCHEDULES = ("dispatch", "vocab", "boundaries", "optimizer")
_FEW = 16  # tokens of the first step, whose only use is the optimizer's state


@dataclass(frozen=True, kw_only=True)
class EndToEndModel:
    """
    A Mixtral. Arguments: H, I, L, E, k, V; `heads` of `head_dim`, all of them on one head of keys and values.
    """

    hidden: int
    width: int
    layers: int
    experts: int
    top_k: int
    vocab: int
    heads: int = 1
    head_dim: int = 16

    def config(self) -> PreTrainedConfig:
        return AutoConfig.for_model(
            "mixtral",
            hidden_size=self.hidden,
            intermediate_size=self.width,
            num_hidden_layers=self.layers,
            num_local_experts=self.experts,
            num_experts_per_tok=self.top_k,
            vocab_size=self.vocab,
            num_attention_heads=self.heads,
            num_key_value_heads=1,
            head_dim=self.head_dim,
            max_position_embeddings=2**20,
            use_cache=False,
        )


@dataclass(frozen=True, kw_only=True)
class SideSizes:
    """
    Arguments:
        model (`EndToEndModel`): what is trained, in float32.
        ranks (`int`): FSDP2 and expert parallelism over all of them, each with a sequence of its own.
        schedules (`tuple[str, ...]`): those of ours that are on; none: stock.
        dispatch, vocab, bucket (`str`): our caps.
        offload (`bool`, defaults to `False`): stock's own offloading of activations.
        device (`bool`, defaults to `True`): whether there is a device apart from the host; `False`: as on a CPU, where
            offloaded memory is where it was.
    """

    model: EndToEndModel
    ranks: int
    schedules: tuple[str, ...] = ()
    dispatch: str = "4MiB"
    vocab: str = "4MiB"
    bucket: str = "1MiB"
    offload: bool = False
    device: bool = True

    def build(self) -> Side:
        return Side(self)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """
    Arguments:
        nbytes: the most alive at once on the device.
        components: of each, at that moment.
        host_bytes: that were offloaded, at most.
        loss: of the step.
    """

    nbytes: int
    components: dict[str, int]
    host_bytes: int
    loss: float


def caps_of(sizes: SideSizes) -> LongMoEConfig:
    """Ours, those that are off as `None`."""
    on = sizes.schedules
    parts: dict[str, Any] = {} if "boundaries" in on else {"boundaries": None}
    # State travels to the device and back: an update on the host would leave the device next to nothing to hold.
    optimizer = OptimizerConfig(bucket=sizes.bucket, update_on="accelerator" if sizes.device else "auto")
    return LongMoEConfig(
        dispatch=DispatchConfig(budget=sizes.dispatch) if "dispatch" in on else None,
        vocab=VocabConfig(budget=sizes.vocab) if "vocab" in on else None,
        optimizer=optimizer if "optimizer" in on else None,
        **parts,
    )


class Side:
    """The model and optimizer of a side, after a first short step."""

    def __init__(self, sizes: SideSizes) -> None:
        self.sizes, caps = sizes, caps_of(sizes)
        self.rank = distributed.get_rank() if distributed.is_initialized() else 0
        self.engine = FakeEngine(seed=self.rank) if sizes.device else None
        self.host = _OnHost()
        self.model = _load(sizes)
        if caps.dispatch is not None or caps.vocab is not None:
            patch_model(self.model, caps)
        self.model.train()
        self.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        if sizes.offload:
            self.model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=self.host.checkpoint)
        if caps.boundaries is not None:
            install_boundaries(self.model, caps.boundaries, self.engine)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        if caps.optimizer is not None:
            values = {**asdict(caps.optimizer), "engine": self.engine}
            self.optimizer = OffloadStreamAdamW.from_adamw(self.optimizer, **values)
        self.step(_FEW)

    def step(self, tokens: int) -> float:
        """A training step of a sequence of `tokens`, another on each rank, the same at each call; its loss."""
        generator = torch.Generator().manual_seed(1 + self.rank)
        ids = torch.randint(self.sizes.model.vocab, (1, tokens), generator=generator)
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def peak(self, tokens: int) -> Peak:
        """A step under the probe."""
        gc.collect()
        self.host.peak = 0
        if self.engine is not None:
            self.engine.peak_host_bytes = self.engine.host_bytes
        with watch(self.model, self.optimizer), StorageProbe() as probe:
            loss = self.step(tokens)
        report = probe.report()
        offloaded = self.engine.peak_host_bytes if self.engine is not None else 0
        return Peak(
            nbytes=report.total,
            components={name: part.at_peak for name, part in report.components.items() if part.at_peak},
            host_bytes=max(offloaded, self.host.peak),
            loss=loss,
        )

    def timed(self, tokens: int) -> tuple[float, float]:
        """CPU seconds of a step on this rank, and its loss."""
        if distributed.is_initialized():
            distributed.barrier()
        begun = time.process_time()
        loss = self.step(tokens)
        return time.process_time() - begun, loss


def _load(sizes: SideSizes) -> PreTrainedModel:
    """The same weights on every side; divided over the ranks as it is loaded, where there are several."""
    torch.manual_seed(0)
    config = sizes.model.config()
    if sizes.ranks == 1:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    rank = distributed.get_rank()
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": sizes.ranks, "LOCAL_WORLD_SIZE": sizes.ranks}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    ours = {"ep_implementation": "pipelined_llep"} if "dispatch" in sizes.schedules else {}
    if "vocab" in sizes.schedules:
        ours["fsdp_plan"] = {"lm_head": "free_full_weight"}
    sharding = DistributedConfig(
        **{"ep_implementation": "all_to_all", **ours}, fsdp_size=sizes.ranks, ep_size=sizes.ranks
    )
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        distributed.broadcast_object_list(folder)
        if rank == 0:
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(own)
        distributed.barrier()
        model = AutoModelForCausalLM.from_pretrained(
            folder[0], dtype=torch.float32, attn_implementation="sdpa", distributed_config=sharding
        )
        distributed.barrier()
    return model


class _OnHost:
    """
    Transformers' `activation_checkpointing_enable(offload=True)` on a device made of host memory: what a checkpointed
    layer saves for its recompute is copied to the host, and back in backward. (Its own way needs pinned memory.)
    """

    def __init__(self) -> None:
        self.bytes = self.peak = 0

    def checkpoint(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(self._down, self._up):
            return checkpoint(function, *args, **{"use_reentrant": False, **kwargs})

    def _down(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Size]:
        nbytes = max(tensor.numel() * tensor.element_size(), 1)
        host = torch.frombuffer(bytearray(nbytes), dtype=torch.uint8)
        flat = host[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
        flat.view(tensor.shape).copy_(tensor.detach())
        self.bytes += nbytes
        self.peak = max(self.peak, self.bytes)
        return flat, tensor.shape

    def _up(self, packed: tuple[torch.Tensor, torch.Size]) -> torch.Tensor:
        flat, shape = packed
        self.bytes -= max(flat.numel() * flat.element_size(), 1)
        return torch.empty(shape, dtype=flat.dtype).copy_(flat.view(shape))
