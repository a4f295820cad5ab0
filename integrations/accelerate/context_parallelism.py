"""Accelerate's `ParallelismConfig` for ranks whose sequences are shared by `LongMoEPlugin`, and not by Accelerate."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import ParallelismConfig

__all__ = ["ContextParallelismConfig"]


class ContextParallelismConfig(ParallelismConfig):
    """
    A `ParallelismConfig` with the same fields, launch keys and mesh; its `cp` ranks get the same batch, as Accelerate
    gives them. But Accelerate and the Trainer divide no sequence: to them `cp_enabled` is false, which otherwise means
    torch's own context parallelism, with its hooks, its demand for SDPA and, on accelerators, for Accelerate's FSDP2.

    `LongMoETrainer` makes it of the `ParallelismConfig` of its arguments or of the launch, and `LongMoEPlugin.install`
    of that of an Accelerator. Where an Accelerator refuses a `ParallelismConfig(cp_size=...)` for want of an
    `fsdp_plugin`, give it this one.

    ```py
    >>> from hf_longmoe.integrations.accelerate import ContextParallelismConfig
    >>> config = ContextParallelismConfig(dp_shard_size=2, cp_size=4)
    >>> config.cp_enabled, config.total_size, config.active_mesh_dims
    (False, 8, ['dp_shard', 'cp'])

    ```
    """

    @classmethod
    def of(cls, config: ParallelismConfig) -> ContextParallelismConfig:
        """The same sizes, and the mesh, if there is one; `config` stays as it is."""
        made = cls.__new__(cls)
        vars(made).update(vars(config))
        made._sizes = dict(config._sizes)
        return made

    @property
    def cp_enabled(self) -> bool:
        return False

    @property
    def non_dp_dim_names(self) -> list[str]:
        return [*super().non_dp_dim_names, *self._cp]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        return [*super().dp_shard_cp_dim_names, *self._cp]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        return [*super().dp_cp_dim_names, *self._cp]

    @property
    def _cp(self) -> list[str]:
        return ["cp"] if self.cp_size > 1 else []

    def check_world(self, world_size: int) -> None:
        """
        Raises:
            `ValueError`: the sizes are for another number of processes.
        """
        if self.total_size != world_size:
            fits = f" (dp_shard_size={world_size // self.cp_size} fits)" if world_size % self.cp_size == 0 else ""
            raise ValueError(
                f"ParallelismConfig: dp_replicate_size={self.dp_replicate_size} x dp_shard_size={self.dp_shard_size}"
                f" x cp_size={self.cp_size} x tp_size={self.tp_size} is {self.total_size}, but there are {world_size}"
                f" processes{fits}."
            )

    # What Accelerate asks at the end of `Accelerator()`. Its own takes no processes on CPUs, and knows `cp` by
    # `cp_enabled` alone.
    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        if self.cp_size == 1:
            super()._validate_accelerator(accelerator)
        else:
            self.check_world(accelerator.num_processes)
