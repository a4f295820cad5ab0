"""`LongMoEPlugin`: offloaded boundaries, the streaming optimizer and shared sequences, on one Accelerator."""

from __future__ import annotations

import math
import os
import weakref
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_longmoe.config import LongMoEConfig
from hf_longmoe.integrations.accelerate.boundaries import Installed, check_boundaries, install_boundaries
from hf_longmoe.integrations.accelerate.checks import check_early_gradients, check_installable, state_bytes
from hf_longmoe.integrations.accelerate.heads import divide_heads, repatch
from hf_longmoe.integrations.accelerate.optimizers import give_back, is_sharded, plain_of, put, tell_schedulers
from hf_longmoe.integrations.accelerate.sequences import Sequences
from hf_longmoe.integrations.transformers.refusals import check_launch
from hf_longmoe.schedules.host import AcceleratorEngine, Engine, check_host_memory, has_own_memory
from hf_longmoe.schedules.optimizer import OffloadStreamAdamW, check_adamw
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
    - With `ParallelismConfig(cp_size=...)`, ranks that get the same batch share its sequences, see `SharedSequences`.

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
        self._sequences: Sequences | None = None
        # Accelerator.free_memory, and whoever drops an optimizer, is not to be kept from freeing its state.
        self._optimizers: list[weakref.ref[OffloadStreamAdamW]] = []

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
        self._sequences = Sequences(accelerator)
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
        self._sequences.remove()
        while self._models:
            self._models.pop().remove()
        for streaming in self._living():
            give_back(streaming, accelerator._optimizers)
        self._optimizers.clear()

    def __enter__(self) -> LongMoEPlugin:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def __str__(self) -> str:
        """Where boundaries and state were in the last step."""
        lines = []
        for installed in self._models:
            offload = installed.offload
            if installed.model() is None:
                continue
            if offload is None:
                lines.append("boundaries: left where they are, since the model is in host memory")
            else:
                lines.append(
                    f"boundaries: {offload.offloaded} of {offload.offloaded + offload.left} in"
                    f" {format_bytes(offload.host_bytes)} of host memory"
                )
        for streaming in self._living():
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
        """Everything that can be refused is refused before any change, and the first collective."""
        self._check(args)
        known = len(self._optimizers)
        streamed = {id(arg): self._streamed(arg) for arg in args if isinstance(arg, torch.optim.Optimizer)}
        try:
            divided = divide_heads(self._accelerator, self.config, args)
            prepared = prepare(*(streamed.get(id(arg), arg) for arg in args), **kwargs)
        except BaseException:
            for ref in self._optimizers[known:]:
                give_back(ref(), [*self._accelerator._optimizers, *args])
            del self._optimizers[known:]
            raise
        for model in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
            self._install(model)
        for model in divided:
            repatch(model)
        tell_schedulers(self._accelerator)
        return prepared

    def _check(self, args: tuple) -> None:
        optimizers = [arg for arg in args if isinstance(arg, OffloadStreamAdamW)]
        for arg in args:
            if isinstance(arg, nn.Module):
                self._check_model(arg)
            elif self.config.optimizer is not None and (plain := plain_of(arg)) is not None:
                try:
                    check_adamw(plain)
                except (TypeError, ValueError) as error:
                    note = "LongMoEConfig(optimizer=None) leaves it as it is."
                    raise ValueError(f"LongMoEPlugin: {error} {note}") from error
                optimizers.append(plain)
        if optimizers:
            self._check_host_memory(optimizers)

    def _check_model(self, module: nn.Module) -> None:
        self._sequences.check(models := _transformers_models(module))
        for model in models if self.config.boundaries is not None else ():
            check_boundaries(model, self._of(model))

    def _prepare_model(self, prepare_model: Any, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        self._check_model(model)
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
        self._install(prepared)
        return prepared

    def _streamed(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """What to prepare in its place. One that is prepared already streams from here on."""
        caps, plain = self.config.optimizer, plain_of(optimizer)
        if caps is None or plain is None:
            return optimizer
        known = next((streaming for streaming in self._living() if streaming.replaces is plain), None)
        if known is None:
            known = OffloadStreamAdamW.from_adamw(
                plain,
                bucket=caps.bucket,
                slots=caps.slots,
                update_on=caps.update_on,
                early_gradients=caps.early_gradients,
                engine=self._engine,
            )
            self._optimizers.append(weakref.ref(known))
        if isinstance(optimizer, AcceleratedOptimizer):
            put(optimizer, known)
            return optimizer
        return known

    def _living(self) -> list[OffloadStreamAdamW]:
        return [streaming for ref in self._optimizers if (streaming := ref()) is not None]

    def _check_host_memory(self, optimizers: list[torch.optim.Optimizer]) -> None:
        accelerator = self._accelerator
        shards = accelerator.num_processes if accelerator.distributed_type == DistributedType.FSDP else 1
        needed = sum(state_bytes(optimizer, shards) for optimizer in optimizers)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
        check_host_memory(needed, "The optimizer's state (LongMoEConfig.optimizer)", ranks)
        repeated = accelerator.num_processes > 1 and shards == 1 and not any(map(is_sharded, optimizers))
        if repeated and accelerator.is_main_process:
            logger.warning(
                f"Without FSDP2 each of {accelerator.num_processes} ranks has all of the optimizer's state:"
                f" {format_bytes(needed)} of host memory a rank."
            )

    def _install(self, module: Any) -> None:
        if not isinstance(module, nn.Module):
            return
        self._sequences.share(_transformers_models(module), module)
        if self.config.boundaries is None:
            return
        self._models = [one for one in self._models if one.model() is not None]
        for model in _transformers_models(module):
            known = self._of(model)
            if known is not None:
                known.refresh()
                continue
            self._models.append(install_boundaries(model, self.config.boundaries, self._engine))
            dynamo = self._accelerator.state.dynamo_plugin
            if self._engine is not None and dynamo.backend != DynamoBackend.NO and not dynamo.use_regional_compilation:
                logger.warning(
                    "A model that is compiled as a whole has no checkpointed layers at run time, so that its"
                    " boundaries stay on the device."
                )

    def _of(self, model: PreTrainedModel) -> Installed | None:
        return next((one for one in self._models if one.model() is model), None)


def _transformers_models(module: nn.Module) -> list[PreTrainedModel]:
    """In `module`, without those inside of another."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return list(dict.fromkeys(model for child in module.children() for model in _transformers_models(child)))


def _refuse_clipping(parameters: Any, max_norm: float = 0.0, *args: Any, **kwargs: Any) -> torch.Tensor:
    if max_norm == math.inf:  # to no norm: the Trainer only wants to know it, and cannot
        return torch.tensor(math.nan)
    raise ValueError(
        "optimizer.early_gradients=True: gradients have left the device before they could be clipped; set"
        " max_grad_norm=0 (Trainer), leave the clipping out, or use early_gradients=False."
    )
