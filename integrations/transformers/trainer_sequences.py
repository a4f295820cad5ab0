"""How a Trainer counts and batches when ranks share a sequence, and what the router's auxiliary loss weighs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import DataLoaderConfiguration, ParallelismConfig
from torch import nn

from hf_longmoe.integrations.ringmaster import check_ringmaster
from hf_longmoe.integrations.transformers.causal_lm import causal_lm

__all__ = ["TrainerSequences"]


class TrainerSequences:
    """
    A mixin of `Trainer`.

    - `ParallelismConfig(cp_size=...)`, of `TrainingArguments` or of the launch, is left to `LongMoEPlugin`, which has
      the ranks share their sequences. The Trainer's own counts are right then: `num_items_in_batch` is the number of
      labels of all groups and micro-batches of a step, each once, and the loss that it logs is the mean over them.
      Iterable datasets are read by each rank, as with `dispatch_batches=False`.
    - The router's auxiliary loss weighs `router_aux_loss_coef` in each step: times the mean, over the data ranks
      (groups of ranks that share sequences are one) and over the step's micro-batches, of what each batch gives. The
      stock Trainer multiplies it by the number of data ranks, where `average_tokens_across_devices` is on, and adds it
      up over micro-batches.
    - `evaluate` gives the loss of whole sequences. Metrics, and `predict`, would need whole logits, and are refused
      where ranks share sequences.
    """

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        args = super()._build_accelerator_args(**kwargs)
        config = args.get("parallelism_config")
        if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
            config = ParallelismConfig()  # of the launch
        if config is not None and config.cp_size > 1:
            # That room imports this one.
            from hf_longmoe.integrations.accelerate.context_parallelism import ContextParallelismConfig

            check_ringmaster()
            args["parallelism_config"] = config = ContextParallelismConfig.of(config)
            config.check_world(self.args.world_size)
            _read_by_each(args.get("dataloader_config"))
        return args

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """As the Trainer's; see the class for what the auxiliary loss weighs in it."""
        target = causal_lm(model)
        if self.get_cp_size() > 1 and "longmoe_sequences" not in vars(target):
            raise ValueError(
                f"ParallelismConfig(cp_size={self.get_cp_size()}) is brought about by LongMoEPlugin: call"
                " LongMoEPlugin(config).install(trainer.accelerator) before train() and evaluate()."
            )
        with _weighted(target, 1 / self._times(target.training, num_items_in_batch is not None)):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _times(self, training: bool, counted: bool) -> int:
        """How often the Trainer counts in a step what is a mean already."""
        times, custom = 1, self.compute_loss_func is not None
        if not (counted and (self.model_accepts_loss_kwargs or custom)):
            return times
        if self.args.average_tokens_across_devices and self.args.n_gpu <= 1:
            times *= self.accelerator.num_processes // self.get_tp_size()
        if training:
            times *= self.current_gradient_accumulation_steps
        return times

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """
        As the Trainer's.

        Raises:
            `ValueError`: ranks share sequences, and more than the loss is asked for.
        """
        if self.get_cp_size() == 1:
            return super().evaluation_loop(dataloader, description, prediction_loss_only, *args, **kwargs)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if not loss_only:
            raise ValueError(
                f"{description} with compute_metrics or predict needs whole logits, of which each rank has a part"
                f" (ParallelismConfig.cp_size={self.get_cp_size()}): leave compute_metrics out, or set"
                " prediction_loss_only=True."
            )
        gather, self.gather_function = self.gather_function, self._gather_each_once
        try:
            return super().evaluation_loop(dataloader, description, prediction_loss_only, *args, **kwargs)
        finally:
            self.gather_function = gather

    def _gather_each_once(self, losses: torch.Tensor) -> torch.Tensor:
        """`accelerator.gather_for_metrics`, of one rank of each group: all of a group have the same."""
        gathered = self.accelerator.gather(losses).view(-1, self.get_cp_size(), len(losses))[:, 0].reshape(-1)
        state = self.accelerator.gradient_state
        ends = state.end_of_dataloader and state.remainder > 0
        return gathered[: state.remainder] if ends else gathered


def _read_by_each(loader: DataLoaderConfiguration | None) -> None:
    """Accelerate's dispatching, its default for iterable datasets, would give each rank of a group another batch."""
    if loader is not None and loader.dispatch_batches:
        raise ValueError(
            "accelerator_config: dispatch_batches=True gives ranks that share sequences (ParallelismConfig.cp_size)"
            " different batches; leave it out, or set it to False."
        )
    if loader is not None:
        loader.dispatch_batches = False


@contextlib.contextmanager
def _weighted(model: nn.Module, factor: float) -> Iterator[None]:
    """Inside, the auxiliary loss weighs `factor` of what it does, wherever the model looks its weight up."""
    name = "router_aux_loss_coef"
    places = [place for place in (model, model.config.get_text_config()) if name in vars(place)]
    before = [getattr(place, name) for place in places]
    for place, value in zip(places, before, strict=True):
        setattr(place, name, value if value is None else value * factor)
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            setattr(place, name, value)
