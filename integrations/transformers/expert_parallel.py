"""`ep_implementation="pipelined_llep"`: Transformers' expert parallelism on the pipelined schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import (
    EpDispatchExpertsParallel,
    EPImplementation,
    EPImplementationInterface,
)
from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

from hf_longmoe.config import DispatchConfig
from hf_longmoe.integrations.transformers.experts import (
    Adapters,
    block_of,
    drop_adapters,
    hidden_of,
    is_called_as_interface,
)
from hf_longmoe.schedules.dispatch import PipelinedDispatch, PipelineSizes, pipeline_sizes
from hf_longmoe.schedules.dispatch.clone import bare_clone
from hf_longmoe.schedules.wire import GroupWire
from hf_longmoe.sizes import format_bytes

__all__ = [
    "NAME",
    "ExpertSettings",
    "PipelinedLLEP",
    "ep_note",
    "install",
    "is_expert_parallel",
    "pipelined",
    "replaced_implementations",
    "sizes_of",
    "uninstall",
    "why_not",
]

NAME = "pipelined_llep"
_SUMMED = "replicated_with_grad_allreduce"


@dataclass(frozen=True)
class ExpertSettings:
    """What `patch_model` leaves on an experts module, as `longmoe_schedule`, for its `PipelinedLLEP` to follow."""

    config: DispatchConfig
    output_saved_after: bool = True


class PipelinedLLEP(EPImplementation):
    """
    Expert parallelism whose memory does not depend on the routing: see `PipelinedDispatch`.

    `from_pretrained(..., distributed_config=DistributedConfig(..., ep_implementation="pipelined_llep"))` installs it
    with the default caps (or those of `LONGMOE_DISPATCH_*` in the environment); `patch_model` gives it others.

    Raises:
        `ValueError`: experts that are not called as Transformers' experts interface calls them, or have parameters
            that are neither divided by expert nor shared by all; or a budget below a wave of a few rows. On every
            rank, at load; at the first forward, where no rule of the plan sums the gradients of shared parameters.
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.wire = GroupWire(ep_mesh.get_group())
        self._checked_batch = False
        self._sizes: dict[tuple, PipelineSizes] = {}
        reason = why_not(experts, self.wire.size, loading=True)
        if reason:
            raise ValueError(f'ep_implementation="{NAME}": {type(experts).__name__} {reason}; use "all_to_all".')
        sizes_of(experts, self.wire.size, _settings(experts).config)

    def beside_budget(self) -> int:
        """Bytes that the bound is above the budget."""
        config = _settings(self.experts).config
        return sizes_of(self.experts, self.wire.size, config).bound - config.budget

    @torch.compiler.disable
    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        settings, listener = _settings(self.experts), vars(self.experts).get("longmoe_on_routing")
        if shared := [child for child in self.experts.children() if any(True for _ in child.parameters())]:
            self._sum_gradients_of(shared, hidden_states)
        block, params = block_of(self.experts, settings.config.kernel)
        key = (settings.config, hidden_states.dtype, params[0].dtype, block)
        if key not in self._sizes:  # they depend on nothing else of a call
            hidden = hidden_states.shape[-1]
            self._sizes = {key: _sizes(settings.config, hidden_states.dtype, hidden, block, params, self.wire.size)}
        sizes = self._sizes[key]
        schedule = PipelinedDispatch(self.wire, sizes, settings.output_saved_after, listener)
        tokens = hidden_states.shape[0]
        if self.tp_mesh.size() > 1:
            with self.wire.together():
                self._check_batch(hidden_states)
            hidden_states, top_k_index, top_k_weights = (
                DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False)
                .redistribute(self.tp_mesh, [Shard(0)])
                .to_local()
                for t in (hidden_states, top_k_index, top_k_weights)
            )
        # The replay's function mode looks for the router's top-k; nothing in here is its business.
        with torch._C.DisableTorchFunction():
            output = schedule(hidden_states, top_k_index, top_k_weights, block, params)
        if self.tp_mesh.size() == 1:
            return output
        shape = (tokens, output.shape[1])
        output = DTensor.from_local(output, self.tp_mesh, [Shard(0)], shape=shape, stride=(shape[1], 1))
        return output.full_tensor()

    def _sum_gradients_of(self, shared: list[nn.Module], hidden_states: torch.Tensor) -> None:
        """Has Transformers add up, over the ranks, the gradients of what all experts share: no row of it will do."""
        if reason := why_not(self.experts, self.wire.size):
            raise ValueError(f'ep_implementation="{NAME}": {type(self.experts).__name__} {reason}.')
        row = hidden_states.new_zeros(0, hidden_of(self.experts))
        # Nothing is kept of it, nor seen by a checkpoint, which would count what it saves.
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
            for child in shared:
                child(row)

    def _check_batch(self, hidden_states: torch.Tensor) -> None:
        """Each rank of a TP group computes a part of the batch they share: looks once whether they do share it."""
        if self._checked_batch:
            return
        first, *others = GroupWire(self.tp_mesh.get_group()).gather(_sample(hidden_states))
        for other in others:
            # In thousandths, and in the mean: sums may round differently on each rank.
            apart = sum(abs(a - b) for a, b in zip(first[1:], other[1:], strict=True)) / (len(first) - 1)
            if first[0] != other[0] or apart > 300:
                raise ValueError(
                    f"The {self.tp_mesh.size()} ranks of a tensor-parallel group were given different batches"
                    f" ({[row[0] for row in (first, *others)]} tokens); give all of them the same one (a sampler over"
                    " the data-parallel ranks only)."
                )
        self._checked_batch = True


def _sample(x: torch.Tensor, rows: int = 64, columns: int = 8) -> torch.Tensor:
    """`x [T, H]` -> T, and some of its values in thousandths of their column's root mean square; integers, `[513]`."""
    tokens, hidden = x.shape
    down = torch.arange(rows, device=x.device) * tokens // rows
    across = torch.arange(columns, device=x.device) * hidden // columns
    values = x.detach()[down][:, across].float() if tokens else x.new_zeros(rows, columns, dtype=torch.float32)
    scale = values.square().mean(0).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    thousandths = (1000 * values / scale).nan_to_num().round().to(torch.int64)
    return torch.cat([torch.full_like(thousandths[:1, 0], tokens), thousandths.reshape(-1)])


def why_not(experts: nn.Module, ranks: int, loading: bool = False) -> str | None:
    """
    Why the experts cannot run on the pipelined schedule; `None` if they can.

    Arguments:
        loading: whether the rules of the plan for what they hold are yet to be applied.
    """
    if not is_called_as_interface(experts):
        return "does not go through Transformers' experts interface"
    dtype = next((param.dtype for param in experts.parameters()), None)
    if dtype is None or not dtype.is_floating_point or dtype.itemsize < 2:
        return "is quantised, so it has no weights to compute gradients for"
    for name, param in experts.named_parameters():
        holder = name.rpartition(".")[0]
        if holder and not (loading or _gradients_are_summed(experts.get_submodule(holder))):
            return f'has a parameter, {name}, whose gradients no rule sums ("{_SUMMED}" in the ep_plan does)'
        if not holder and _local_shape(param, ranks)[0] != experts.num_experts:
            return f"has a parameter, {name}, that is not divided by expert"
        if param.dtype != dtype:
            return f"has parameters of different dtypes ({name} is {param.dtype})"
    return None


def sizes_of(
    experts: nn.Module, ranks: int, config: DispatchConfig, adapters: Adapters | None = None
) -> PipelineSizes:
    """What the budget buys, before anything has run; raises as `pipeline_sizes` does."""
    # Stand-ins of the shapes that the experts will have when they run: FSDP2 may hold less of them until then.
    clone = bare_clone(experts)
    for name, param in experts.named_parameters():
        if "." not in name:
            like = torch.empty(_local_shape(param, ranks), dtype=param.dtype, device="meta")
            clone._parameters[name] = nn.Parameter(like, requires_grad=param.requires_grad)
    block, params = block_of(clone, config.kernel, adapters)
    hidden = hidden_of(clone)
    return _sizes(config, params[0].dtype, hidden, block, params, ranks)


def ep_note(experts: nn.Module, ranks: int, config: DispatchConfig, adapters: Any = None) -> str:
    """For the report: what a wave holds, and the bound that no routing passes."""
    sizes = sizes_of(experts, ranks, config, None if adapters is None else adapters.active())
    lent = sizes.caps.foreign // (sizes.caps.weight_bytes + sizes.caps.gradient_bytes)
    lending = f"{lent} lent experts in flight" if lent else "nothing lent"
    lending += "" if adapters is None else f", {adapters}"
    return f"{sizes.caps.rows} rows a wave, {sizes.tile} a tile, {lending}; never above {format_bytes(sizes.bound)}"


def _gradients_are_summed(module: nn.Module) -> bool:
    """Whether a rule of the plan has Transformers sum the gradients of the module's parameters over the ranks."""
    forward = getattr(vars(module).get("forward"), "__qualname__", "")
    return forward.startswith(ReplicatedWithGradAllReduce.install_forward.__qualname__)


def _local_shape(param: torch.Tensor, ranks: int) -> tuple[int, ...]:
    """The shape of a rank's part of a parameter that is divided by expert, where FSDP2 has gathered it."""
    if not isinstance(param, DTensor):
        return tuple(param.shape)
    return (param.shape[0] // ranks, *param.shape[1:])


def _sizes(config: DispatchConfig, dtype: torch.dtype, hidden: int, block, params, ranks: int) -> PipelineSizes:
    return pipeline_sizes(
        config.budget, hidden, dtype, block, params, ranks, depth=config.overlap, imbalance=config.imbalance
    )


def _settings(experts: nn.Module) -> ExpertSettings:
    return vars(experts).get("longmoe_schedule") or ExpertSettings(DispatchConfig())


def is_expert_parallel(module: nn.Module) -> bool:
    """Whether Transformers' expert parallelism has replaced the module's `forward`."""
    forward = vars(module).get("forward")
    return getattr(forward, "__qualname__", "").startswith(EpDispatchExpertsParallel.install_forward.__qualname__)


def pipelined(module: nn.Module) -> PipelinedLLEP | None:
    """What runs the module on the pipelined schedule, if it does: loaded with it, or patched."""
    cells = vars(module)["forward"].__closure__ if is_expert_parallel(module) else ()
    return next((c.cell_contents for c in cells if isinstance(c.cell_contents, PipelinedLLEP)), None)


def replaced_implementations(model: nn.Module) -> Iterator[str]:
    """Names of patched modules that somebody has given another `forward` since."""
    for name, module in model.named_modules():
        if "longmoe_ep_forward" in vars(module) and pipelined(module) is None:
            yield name


def install(model: PreTrainedModel, experts: nn.Module, settings: ExpertSettings) -> None:
    """Puts the schedule in the place of the implementation that the experts were loaded with."""
    meshes = model._mesh_manager
    experts.longmoe_ep_forward = vars(experts).pop("forward")
    experts.longmoe_schedule = settings
    try:
        EpDispatchExpertsParallel().install_forward(
            experts, meshes.get_mesh("ep"), tp_mesh=meshes.get_mesh("tp"), ep_implementation=NAME
        )
    except ValueError:
        uninstall(experts)
        raise


def uninstall(experts: nn.Module) -> None:
    drop_adapters(experts)
    experts.forward = vars(experts).pop("longmoe_ep_forward")
    del experts.longmoe_schedule


EPImplementationInterface.register(NAME, PipelinedLLEP)
