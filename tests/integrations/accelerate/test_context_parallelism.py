"""Accelerate's `ParallelismConfig` with `cp_size`, left to the plugin."""

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, ParallelismConfig

from hf_longmoe import LongMoEPlugin
from hf_longmoe.integrations.accelerate import ContextParallelismConfig
from hf_longmoe.integrations.transformers.trainer_sequences import TrainerSequences


def test_it_has_everything_but_accelerates_own_hooks():
    stock = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2)
    ours = ContextParallelismConfig.of(stock)
    assert stock.cp_enabled and not ours.cp_enabled
    names = ("cp_size", "total_size", "non_dp_dim_names", "dp_shard_cp_dim_names", "dp_cp_dim_names", "fsdp_dim_names")
    for name in (*names, "active_mesh_dims", "data_parallel_size", "non_data_parallel_size"):
        assert getattr(ours, name) == getattr(stock, name), name
    assert ours._get_mesh() == stock._get_mesh() == (("dp_replicate", "dp_shard", "cp"), (2, 2, 2))
    ours._set_size("dp_shard", 4)
    assert stock.dp_shard_size == stock._sizes["dp_shard"] == 2


def test_sizes_of_another_world():
    config = ContextParallelismConfig(cp_size=2)
    config.check_world(2)
    with pytest.raises(ValueError, match=r"cp_size=2 x tp_size=1 is 2, but there are 4 processes \(dp_shard_size=2"):
        config.check_world(4)
    with pytest.raises(ValueError, match=r"is 2, but there are 3 processes\.$"):
        config.check_world(3)


class Stock:
    """As much of a Trainer as makes an Accelerator's arguments."""

    class args:
        world_size = 4

    def _build_accelerator_args(self, **kwargs):
        return kwargs


class Ours(TrainerSequences, Stock):
    pass


def test_the_trainer_takes_it_of_its_arguments_or_of_the_launch(monkeypatch):
    config = ParallelismConfig(dp_shard_size=2, cp_size=2)
    taken = Ours()._build_accelerator_args(parallelism_config=config)["parallelism_config"]
    assert type(taken) is ContextParallelismConfig and type(config) is ParallelismConfig
    with pytest.raises(ValueError, match=r"is 2, but there are 4 processes \(dp_shard_size=2 fits\)"):
        Ours()._build_accelerator_args(parallelism_config=ParallelismConfig(cp_size=2))
    loader = DataLoaderConfiguration()
    Ours()._build_accelerator_args(parallelism_config=config, dataloader_config=loader)
    assert loader.dispatch_batches is False
    loader.dispatch_batches = True
    with pytest.raises(ValueError, match="dispatch_batches=True gives ranks that share sequences"):
        Ours()._build_accelerator_args(parallelism_config=config, dataloader_config=loader)
    other = ParallelismConfig(dp_shard_size=4)
    assert Ours()._build_accelerator_args(parallelism_config=other)["parallelism_config"] is other
    assert Ours()._build_accelerator_args() == {}
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "4")
    assert Ours()._build_accelerator_args()["parallelism_config"].cp_size == 4


def test_the_plugin_takes_an_accelerators_and_gives_it_back():
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    config = accelerator.state.parallelism_config = ParallelismConfig(cp_size=2)
    with LongMoEPlugin().install(accelerator):
        assert type(accelerator.parallelism_config) is ContextParallelismConfig
        assert not accelerator.parallelism_config.cp_enabled and accelerator.parallelism_config.cp_size == 2
    assert accelerator.parallelism_config is config
    AcceleratorState._reset_state(True)
