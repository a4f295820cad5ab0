"""`LongMoEPlugin`: offloaded checkpoint boundaries and the streaming optimizer, installed on one Accelerator."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_longmoe.config import LongMoEConfig
from hf_longmoe.integrations.accelerate.boundaries import Installed, install_boundaries
from hf_longmoe.integrations.accelerate.checks import check_early_gradients, check_installable, state_bytes
from hf_longmoe.integrations.accelerate.heads import divide_heads, repatch
from hf_longmoe.integrations.transformers.refusals import check_launch
from hf_longmoe.schedules.host import AcceleratorEngine, Engine, check_host_memory, has_own_memory
from hf_longmoe.schedules.optimizer import OffloadStreamAdamW
from hf_longmoe.sizes import format_bytes

__all__ = ["LongMoEPlugin"]

logger = logging.get_logger(__name__)


class LongMoEPlugin:
    """
    What `accelerator.prepare` prepares from here on has its checkpoint boundaries offloaded and its AdamW streamed.

    - A plain `torch.optim.AdamW` becomes an [`OffloadStreamAdamW`], with its groups; a scheduler made for it goes on
      working.
    - Whenever activation checkpointing is on, or is switched on later, the inputs of checkpointed layers wait for
      backward in host memory (SCO). On a device without memory of its own there is nothing to offload.

    The same object serves the Trainer (`install(trainer.accelerator)`, before `train()`), plain loops, DDP, FSDP2,
    and models that were sharded when they were loaded. `patch_model` is independent of it. It is a context manager
    too: it removes itself on exit.

    Arguments:
        config (`LongMoEConfig`, *optional*): its `boundaries` and `optimizer`; `None` for one switches that off.
        engine (`Engine`, *optional*): does the copies; by default the accelerator's own streams.

    ```py
    >>> from accelerate import Accelerator
    >>> from hf_longmoe import LongMoEPlugin
    >>> import torch
    >>> accelerator = Accelerator(cpu=True)
    >>> plugin = LongMoEPlugin().install(accelerator)
    >>> layer = torch.nn.Linear(2, 2)
    >>> layer, optimizer = accelerator.prepare(layer, torch.optim.AdamW(layer.parameters()))
    >>> type(optimizer.optimizer).__name__
    'OffloadStreamAdamW'
    >>> plugin.remove()
    >>> type(optimizer.optimizer).__name__
    'AdamW'

    ```
    """

    def __init__(self, config: LongMoEConfig | None = None, *, engine: Engine | None = None) -> None:
        self.config = LongMoEConfig() if config is None else config
        self._engine = engine
        self._accelerator: Accelerator | None = None
        self._models: list[Installed] = []
        self._optimizers: list[tuple[OffloadStreamAdamW, torch.optim.AdamW]] = []

    # -- on and off --------------------------------------------------------------------------------------------------
    def install(self, accelerator: Accelerator) -> LongMoEPlugin:
        """
        Arguments:
            accelerator (`Accelerator`): one that has prepared no model and no optimizer yet.

        Returns:
            The plugin.

        Raises:
            `ValueError`: the accelerator has a plugin already, or has prepared something, or the launch is of a kind
                that is not supported; or `early_gradients` meet loss scaling or gradient accumulation.
        """
        check_installable(self, accelerator)
        check_launch()
        if self.config.optimizer is not None and self.config.optimizer.early_gradients:
            check_early_gradients(accelerator)
            accelerator.clip_grad_norm_ = accelerator.clip_grad_value_ = _refuse_clipping
        self._accelerator = accelerator
        if self._engine is None and has_own_memory(accelerator.device):
            self._engine = AcceleratorEngine(accelerator.device)
        accelerator.longmoe = self
        accelerator.prepare = partial(self._prepare, accelerator.prepare)
        accelerator.prepare_model = partial(self._prepare_model, accelerator.prepare_model)
        return self

    def remove(self) -> None:
        """
        Puts the accelerator, its models' checkpointing and its optimizers back: each AdamW takes its place again, with
        the state that the streaming one has, on the parameters' device. Not between a forward and its backward.
        """
        accelerator, self._accelerator = self._accelerator, None
        if accelerator is None:
            return
        for name in ("longmoe", "prepare", "prepare_model", "clip_grad_norm_", "clip_grad_value_"):
            vars(accelerator).pop(name, None)
        while self._models:
            self._models.pop().remove()
        while self._optimizers:
            _give_back(accelerator, *self._optimizers.pop())

    def __enter__(self) -> LongMoEPlugin:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def __str__(self) -> str:
        """Where boundaries and state were in the last step."""
        lines = []
        for installed in self._models:
            offload = installed.offload
            if offload is None:
                lines.append("boundaries: left where they are, since the model is in host memory")
            else:
                lines.append(
                    f"boundaries: {offload.offloaded} of {offload.offloaded + offload.left} in"
                    f" {format_bytes(offload.host_bytes)} of host memory"
                )
        for streaming, _ in self._optimizers:
            timings = streaming.timings
            if timings is not None:
                lines.append(
                    f"optimizer: {timings.elements['accelerator']} elements updated on the accelerator,"
                    f" {timings.elements['host']} on the host; {format_bytes(timings.nbytes['down'])} down,"
                    f" {format_bytes(timings.nbytes['up'])} up; {timings.step:.3f} s, one stage after the other"
                    f" {timings.serial:.3f} s, the longest {timings.shortest:.3f} s"
                )
        return "\n".join(lines)

    # -- what the accelerator is asked to prepare --------------------------------------------------------------------
    def _prepare(self, prepare: Any, *args: Any, **kwargs: Any) -> Any:
        """Everything that can be refused is refused before the first collective of `prepare`."""
        streamed = {id(arg): self._streamed(arg) for arg in args if isinstance(arg, torch.optim.Optimizer)}
        for streaming in streamed.values():
            self._check_host_memory(streaming)
        divided = divide_heads(self._accelerator, self.config, args)
        prepared = prepare(*(streamed.get(id(arg), arg) for arg in args), **kwargs)
        for model in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
            self._install_boundaries(model)
        for model in divided:
            repatch(model)
        return prepared

    def _prepare_model(self, prepare_model: Any, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        prepared = prepare_model(model, *args, **kwargs)
        if (
            isinstance(prepared, DistributedDataParallel)
            and self.config.optimizer
            and self.config.optimizer.early_gradients
        ):
            raise ValueError(
                "optimizer.early_gradients=True: DDP sums gradients over ranks after they would have left the device;"
                " use FSDP2, or early_gradients=False."
            )
        self._install_boundaries(prepared)
        return prepared

    def _streamed(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        caps = self.config.optimizer
        if caps is None or isinstance(optimizer, (AcceleratedOptimizer, OffloadStreamAdamW)):
            return optimizer
        try:
            streaming = OffloadStreamAdamW.from_adamw(
                optimizer,
                bucket=caps.bucket,
                slots=caps.slots,
                update_on=caps.update_on,
                early_gradients=caps.early_gradients,
                engine=self._engine,
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"LongMoEPlugin: {error} LongMoEConfig(optimizer=None) leaves it as it is.") from error
        self._optimizers.append((streaming, optimizer))
        return streaming

    def _check_host_memory(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, OffloadStreamAdamW):
            return
        accelerator = self._accelerator
        shards = accelerator.num_processes if accelerator.distributed_type == DistributedType.FSDP else 1
        needed = state_bytes(optimizer, shards)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
        check_host_memory(needed, "The optimizer's state (LongMoEConfig.optimizer)", ranks)
        repeated = accelerator.num_processes > 1 and shards == 1 and not _sharded(optimizer)
        if repeated and accelerator.is_main_process:
            logger.warning(
                f"Without FSDP2 each of {accelerator.num_processes} ranks has all of the optimizer's state:"
                f" {format_bytes(needed)} of host memory a rank."
            )

    def _install_boundaries(self, model: Any) -> None:
        if self.config.boundaries is None or not isinstance(model, nn.Module):
            return
        held = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if held is None:
            return
        known = next((one for one in self._models if one.model is held), None)
        if known is None:
            self._models.append(install_boundaries(held, self.config.boundaries, self._engine))
        else:
            known.refresh()


def _refuse_clipping(*args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        "optimizer.early_gradients=True: gradients have left the device before they could be clipped; set"
        " max_grad_norm=0 (Trainer), leave the clipping out, or use early_gradients=False."
    )


def _sharded(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])


def _give_back(accelerator: Accelerator, streaming: OffloadStreamAdamW, plain: torch.optim.AdamW) -> None:
    streaming.disarm()
    plain.load_state_dict(streaming.plain_state_dict())
    for prepared in accelerator._optimizers:
        if prepared.optimizer is streaming:
            prepared.optimizer = plain
            if prepared.scaler is not None:
                prepared._optimizer_original_step_method = plain.step
                prepared._optimizer_patched_step_method = patch_optimizer_step(prepared, plain.step)
