"""`LongMoEAxolotlPlugin`: the schedules at Axolotl's documented hooks."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from torch import nn
from transformers import Trainer

from hf_longmoe.integrations.accelerate import LongMoEPlugin
from hf_longmoe.integrations.axolotl.args import config_of
from hf_longmoe.integrations.transformers import ComponentPeakCallback, patch_model, unpatch_model

__all__ = ["LongMoEAxolotlPlugin"]

# Keys that bound, or replace, what a part of the config bounds; by that part.
_TWICE = {
    "vocab": ("cut_cross_entropy", "chunked_cross_entropy", "liger_fused_linear_cross_entropy"),
    "dispatch": ("tiled_mlp", "use_scattermoe", "use_sonicmoe"),
    "boundaries": ("activation_offloading", "layer_offloading"),
}


class LongMoEAxolotlPlugin(BasePlugin):
    """
    Named in the YAML as `hf_longmoe.integrations.axolotl.LongMoEAxolotlPlugin`, with its keys `longmoe` and
    `longmoe_peaks_every` (see `LongMoEArgs`).

    The model is patched after it was loaded, adapters included; `LongMoEPlugin` is installed on the trainer's
    Accelerator; component peaks go to the trackers. After training all is undone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._plugin: LongMoEPlugin | None = None

    def get_input_args(self) -> str:
        return "hf_longmoe.integrations.axolotl.args.LongMoEArgs"

    def pre_model_load(self, cfg: Any) -> None:
        """
        Raises:
            `ValueError`: a key asks for what `longmoe` does too, or for a launch that is not supported.
        """
        config = config_of(cfg)
        for part, keys in _TWICE.items():
            given = next((key for key in keys if cfg.get(key)), None)
            if given is not None and getattr(config, part) is not None:
                raise ValueError(
                    f"{given}: {cfg.get(given)!r} does what longmoe.{part} does; remove it, or set longmoe.{part}:"
                    " null."
                )
        if cfg.get("deepspeed"):
            raise ValueError(f"deepspeed: {cfg.get('deepspeed')!r} is not supported; use fsdp_version: 2, or DDP.")
        if (cfg.get("fsdp_config") or cfg.get("fsdp")) and str(cfg.get("fsdp_version")) != "2":
            raise ValueError("fsdp_config: FSDP1 flattens parameters; set fsdp_version: 2.")
        if (cfg.get("context_parallel_size") or 1) > 1:
            raise ValueError(
                f"context_parallel_size: {cfg.get('context_parallel_size')} is not supported here; set it to 1."
            )

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        config = config_of(cfg)
        if config.dispatch is not None or config.vocab is not None:
            patch_model(model, config)

    def add_callbacks_pre_trainer(self, cfg: Any, model: nn.Module) -> list[Any]:
        every = cfg.get("longmoe_peaks_every")
        every = 10 if every is None else every
        return [ComponentPeakCallback(every=every)] if every else []

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        config = config_of(cfg)
        if config.boundaries is not None or config.optimizer is not None:
            self._plugin = LongMoEPlugin(config).install(trainer.accelerator)

    def post_train(self, cfg: Any, model: nn.Module) -> None:
        """Axolotl calls it twice: after training, and after the model was saved."""
        plugin, self._plugin = self._plugin, None
        if plugin is not None:
            plugin.remove()
        unpatch_model(model)
