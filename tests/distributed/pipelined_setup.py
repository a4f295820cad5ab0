"""A stock experts module whole, as one process has it, and this rank's part of it under `PipelinedLLEP`."""

import copy
import functools

import torch
from ranks import mesh_of
from torch import distributed, nn
from transformers import GptOssConfig, MixtralConfig
from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts

from hf_longmoe import DispatchConfig
from hf_longmoe.integrations.transformers.expert_parallel import ExpertSettings, PipelinedLLEP

FAMILIES = {
    "mixtral": (MixtralConfig, MixtralExperts),
    "gpt_oss": (GptOssConfig, GptOssExperts),
    "muse_spark": (MuseSparkTextConfig, MuseSparkExperts),
}


def whole_experts(family="mixtral", implementation="eager", hidden=16, width=12, experts=8, dtype=torch.float64):
    """All experts, the same on every rank."""
    config_class, experts_class = FAMILIES[family]
    moe = "moe_" if family == "muse_spark" else ""
    config = config_class(num_local_experts=experts, **{f"{moe}hidden_size": hidden, f"{moe}intermediate_size": width})
    config._experts_implementation = implementation
    module = experts_class(config).to(torch.float64)
    generator = torch.Generator().manual_seed(0)
    for param in module.parameters():
        nn.init.normal_(param, std=0.3, generator=generator)
    return module.to(dtype)


def part_of(experts, rank, ranks, frozen=()):
    """What `rank` of `ranks` holds, as `apply_expert_parallelism` leaves it."""
    part = copy.deepcopy(experts)
    part.num_experts = experts.num_experts // ranks
    part._is_expert_parallel = True
    for name, param in part.named_parameters():
        param.requires_grad_(name not in frozen)
    for name, param in experts.named_parameters(recurse=False):
        mine = param.detach()[rank * part.num_experts : (rank + 1) * part.num_experts].clone()
        part._parameters[name] = nn.Parameter(mine, requires_grad=name not in frozen)
    return part


@functools.cache
def meshes(layout):
    """
    (expert mesh, tensor-parallel mesh) of a layout of all ranks: "world" for one expert group, "pairs" for several of
    two neighbours, "tp" for one whose neighbours share a batch.
    """
    world = list(range(distributed.get_world_size()))
    pairs = [world[at : at + 2] for at in world[::2]]
    return (
        mesh_of(pairs if layout == "pairs" else [world], "ep"),
        mesh_of(pairs if layout == "tp" else [[rank] for rank in world], "tp"),
    )


def pipelined(part, ep_mesh, tp_mesh, *, saved_after=True, record=None, **config):
    """
    `PipelinedLLEP` on this rank's part; `record` takes the `Routing` of each forward. Gradients of what all experts
    share are summed over the ranks once they have been accumulated, as the plan of the family that has such says.
    """
    part.longmoe_schedule = ExpertSettings(DispatchConfig(**config), saved_after)
    part.longmoe_on_routing = record
    ours = PipelinedLLEP(part, ep_mesh, tp_mesh)
    if hasattr(part, "post_expert_norm"):
        ReplicatedWithGradAllReduce().install_forward(part.post_expert_norm, ep_mesh)
    return ours


def routing(kind, tokens, k, experts, ranks, generator):
    """
    Expert ids `[tokens, k]`. `kind`: "balanced", "random", "skew" (80% of the tokens to the first rank's experts),
    "one" (every row to the last expert), "absent" (the first and the last are never chosen), "dropped" (some slots
    belong to no expert), or "dirichlet" (uneven in some random way).
    """
    scores = torch.rand(tokens, experts, generator=generator)
    if kind == "balanced":
        return (torch.arange(tokens)[:, None] * k + torch.arange(k)) % experts
    if kind == "one":
        return torch.full((tokens, k), experts - 1)
    if kind == "skew":
        scores[torch.rand(tokens, generator=generator) < 0.8, : experts // ranks] += 2
    if kind == "absent":
        scores[:, [0, -1]] -= 2
    if kind == "dirichlet":
        scores = scores.log() - 5 * torch.randn(experts, generator=generator).exp()
    index = scores.topk(k)[1]
    if kind == "dropped":
        index[torch.rand(tokens, k, generator=generator) < 0.2] = experts
    return index


def relative(got, want):
    """The largest error against the largest value; against nothing but zeros, any error is infinite."""
    if got.shape != want.shape:
        return float("inf")
    if not want.numel() or torch.equal(got, want):
        return 0.0
    error = ((got.double() - want).abs().max() / want.abs().max()).item()
    return error if error == error else float("inf")
