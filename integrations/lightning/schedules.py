"""All four schedules without an Accelerator: on a model, and an optimizer for Lightning and Fabric."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from hf_longmoe.config import LongMoEConfig
from hf_longmoe.integrations.accelerate.boundaries import Installed, install_boundaries
from hf_longmoe.integrations.transformers.causal_lm import causal_lm
from hf_longmoe.integrations.transformers.patch import patch_model, unpatch_model
from hf_longmoe.schedules.host import AcceleratorEngine, Engine, has_own_memory
from hf_longmoe.schedules.optimizer import OffloadStreamAdamW

__all__ = ["LightningAdamW", "LongMoESchedules"]


class LightningAdamW(OffloadStreamAdamW):
    """`OffloadStreamAdamW` whose state stays in host memory when Lightning moves optimizers to a device."""

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        found = OffloadStreamAdamW.state.fget(self)
        return defaultdict(dict, {parameter: _Kept(values) for parameter, values in found.items()})

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self._state = value

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        return {**found, "state": {name: dict(values) for name, values in found["state"].items()}}


class _Kept(dict):
    """A parameter's state, which `Strategy.load_optimizer_state_dict` would otherwise write a device's copy into."""

    def __setitem__(self, name: str, value: Any) -> None:
        pass

    def __reduce__(self) -> tuple:
        return dict, (dict(self),)  # a copy, or what is unpickled, is filled item by item


class LongMoESchedules:
    """
    For Fabric, and for whoever has no Accelerator: the patch and the offloaded boundaries on a model, and an optimizer
    whose state is in host memory. A context manager too: it removes itself on exit.

    Arguments:
        config (`LongMoEConfig`, *optional*): the caps; a part that is `None` is left as it is.
        engine (`Engine`, *optional*): does the copies; by default the device's own streams.

    ```py
    schedules = LongMoESchedules(config).install(model, fabric.device)  # before fabric.setup
    model, optimizer = fabric.setup(model, schedules.adamw(model.parameters(), lr=1e-4))
    ```
    """

    def __init__(self, config: LongMoEConfig | None = None, *, engine: Engine | None = None) -> None:
        self.config = LongMoEConfig() if config is None else config
        self._engine, self._module, self._installed, self._patched = engine, None, None, False

    @property
    def installed(self) -> Installed | None:
        """The boundaries' part, with `offload` of the last step."""
        return self._installed

    def install(self, module: nn.Module, device: torch.device | str = "cpu") -> LongMoESchedules:
        """
        Arguments:
            module (`nn.Module`): a `PreTrainedModel`, or what holds one (a LightningModule, PEFT). One that is patched
                already keeps its patch.
            device (`torch.device`): where it will train.

        Raises:
            `ValueError`: as `patch_model`, or the boundaries are offloaded already; nothing is changed then.
        """
        if self._module is not None:
            raise ValueError("These LongMoESchedules are on a model already; remove() them there first.")
        model = causal_lm(module)
        if self._engine is None and has_own_memory(torch.device(device)):
            self._engine = AcceleratorEngine(torch.device(device))
        if self.config.boundaries is not None:
            self._installed = install_boundaries(model, self.config.boundaries, self._engine)
        try:
            wanted = self.config.dispatch is not None or self.config.vocab is not None
            if wanted and "longmoe" not in vars(model):
                patch_model(module, self.config)
                self._patched = True
        except BaseException:
            self._remove_boundaries()
            raise
        self._module = module
        return self

    def adamw(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        """
        Arguments:
            params: as `torch.optim.AdamW` takes them. For FSDP2 and the like: the parameters that will be stepped.
            options: `lr`, `betas`, `eps`, `weight_decay`.

        Returns:
            A `LightningAdamW` with the caps of `config.optimizer`; a plain AdamW if that is `None`.
        """
        caps = self.config.optimizer
        if caps is None:
            return torch.optim.AdamW(params, **options)
        more = dict(bucket=caps.bucket, slots=caps.slots, update_on=caps.update_on)
        return LightningAdamW(params, **options, **more, early_gradients=caps.early_gradients, engine=self._engine)

    def remove(self) -> None:
        """Puts the model back as it was. The optimizer stays what it is."""
        module, self._module = self._module, None
        if module is None:
            return
        self._remove_boundaries()
        if self._patched:
            unpatch_model(module)
            self._patched = False

    def _remove_boundaries(self) -> None:
        if self._installed is not None:
            self._installed.remove()
            self._installed = None

    def __enter__(self) -> LongMoESchedules:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()
