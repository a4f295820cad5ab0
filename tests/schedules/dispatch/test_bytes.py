"""The byte budget holds, counted storage by storage, whatever the routing and however many tokens."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hf_longmoe.peaks import StorageProbe
from hf_longmoe.schedules.dispatch import GatedMLP, LocalDispatch, ModelKernel, TokenTiles
from hf_longmoe.schedules.replay import checkpoint_once

E, H, WIDTH, K = 8, 64, 96, 2


def make(implementation="eager", dtype=torch.float32, family=(MixtralConfig, MixtralExperts)):
    config = family[0](hidden_size=H, intermediate_size=WIDTH, num_local_experts=E, num_experts_per_tok=K)
    config._experts_implementation = implementation
    experts = family[1](config).to(dtype)
    for param in experts.parameters():
        nn.init.normal_(param, std=0.1)
    return experts


def peak_beyond(step, *excluded):
    with StorageProbe() as probe:
        kept = step()
    del kept
    return probe.report().total - sum(t.numel() * t.element_size() for t in excluded)


def block_of(experts, kernel):
    if kernel == "written out":
        return GatedMLP(F.silu, silu=True)
    names = tuple(name for name, _ in experts.named_parameters())
    return ModelKernel(experts, names, (True,) * len(names), own_gate=kernel == "gpt_oss")


@pytest.mark.parametrize("kernel", ["written out", "eager", "grouped_mm", "gpt_oss"])
@pytest.mark.parametrize("route", ["random", "one expert"])
@pytest.mark.parametrize("rows", [96, 700])
def test_the_budget_holds(kernel, route, rows):
    family = (GptOssConfig, GptOssExperts) if kernel == "gpt_oss" else (MixtralConfig, MixtralExperts)
    experts = make(kernel if kernel in ("eager", "grouped_mm") else "grouped_mm", family=family)
    params, block = tuple(experts.parameters()), block_of(experts, kernel)
    budget = rows * block.bytes_per_row(H, params)
    # One expert's gradients on top of a kernel's rows, where a quarter of the budget does not hold them.
    one_expert = 0 if kernel == "written out" else sum(p[0].numel() * 4 for p in params)
    schedule = LocalDispatch(budget, output_saved_after=False)

    def peak(tokens):
        torch.manual_seed(0)
        x = torch.randn(tokens, H, requires_grad=True)
        index = torch.rand(tokens, E).topk(K)[1] if route == "random" else torch.full((tokens, K), 3)
        w = torch.rand(tokens, K, requires_grad=True)
        g = torch.randn(tokens, H)

        def step():
            region = checkpoint_once(lambda x, w: schedule(x, index, w, block, params))
            out = checkpoint(region, x, w, use_reentrant=False)
            return torch.autograd.grad(out, (x, w, *params), g), out

        return peak_beyond(step, x, x, *params)  # the output, the input's gradient, the parameters' gradients

    few, many = peak(3_000), peak(12_000)
    for tokens, beyond in ((3_000, few), (12_000, many)):
        assert beyond <= budget + one_expert + 24 * tokens * K  # row indices and routing weights
    assert many >= 0.45 * budget  # and the budget is used: the bound says something


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm"])
@pytest.mark.parametrize(("rows", "tokens"), [(4, 100), (400, 600), (400, 400), (800, 1_600)])
def test_the_models_own_kernel_holds_weight_gradients_beside_its_budget(kernel, rows, tokens):
    """Waves that are full to the last row, of one expert and of several."""
    experts = make(kernel)
    params, block = tuple(experts.parameters()), block_of(experts, kernel)
    budget = rows * block.bytes_per_row(H, params)
    schedule = LocalDispatch(budget, output_saved_after=False)
    x, g = torch.randn(tokens, H, requires_grad=True), torch.randn(tokens, H)
    index = torch.full((tokens, K), 3) if tokens in (100, 600) else torch.arange(tokens * K).view(tokens, K) % E
    w = torch.rand(tokens, K, requires_grad=True)

    def step():
        out = schedule(x, index, w, block, params)
        return torch.autograd.grad(out, (x, w, *params), g), out

    beyond = peak_beyond(step, x, x, *params)
    one = sum(p[0].numel() * 4 for p in params)
    most = block.beside_rows(params, budget)
    assert one <= most <= max(2 * one, budget // 2)
    assert budget < beyond <= budget + most + 24 * tokens * K


def test_stock_needs_what_the_schedule_saves():
    """The comparison the bound is for: the stock path grows with the tokens."""
    experts = make("grouped_mm")
    x, w = torch.randn(8_000, H, requires_grad=True), torch.rand(8_000, K, requires_grad=True)
    index, g = torch.rand(8_000, E).topk(K)[1], torch.randn(8_000, H)

    def step():
        out = checkpoint(lambda x, w: experts(x, index, w), x, w, use_reentrant=False)
        return torch.autograd.grad(out, (x, w, *experts.parameters()), g), out

    assert peak_beyond(step, x, x, *experts.parameters()) > 8_000 * K * 4 * (3 * H + 4 * WIDTH)


@pytest.mark.parametrize("rows", [256, 2_000])
def test_half_precision_adds_at_most_one_experts_float32_gradient(rows):
    experts = make(dtype=torch.bfloat16)
    params, block = tuple(experts.parameters()), GatedMLP(F.silu, silu=True)
    budget = rows * block.bytes_per_row(H, params)
    schedule = LocalDispatch(budget, output_saved_after=False)
    tokens = 6_000
    x = torch.randn(tokens, H).bfloat16().requires_grad_()
    index, w = torch.rand(tokens, E).topk(K)[1], torch.rand(tokens, K, requires_grad=True)
    g = torch.randn(tokens, H).bfloat16()

    def step():
        out = schedule(x, index, w, block, params)
        return torch.autograd.grad(out, (x, w, *params), g), out

    upcast = 512 * (H + 2 * WIDTH) * 4  # operands of one product, a few rows at a time
    one_expert = sum(p[0].numel() * 4 for p in params)
    assert peak_beyond(step, x, x, *params) <= budget + one_expert + upcast + 24 * tokens * K


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(H, WIDTH), nn.Linear(H, WIDTH), nn.Linear(WIDTH, H)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def test_token_tiles_hold_their_budget_and_are_exact():
    mlp = MLP().double()
    x = torch.randn(3, 1_000, H, dtype=torch.float64, requires_grad=True)
    g = torch.randn_like(x)
    tiles = TokenTiles(1 << 20)
    want = mlp(x)
    grads = torch.autograd.grad(want, (x, *mlp.parameters()), g)

    def step():
        out = tiles(mlp, x)
        return torch.autograd.grad(out, (x, *mlp.parameters()), g), out

    got, out = step()
    assert (out - want).abs().max() <= 1e-12 * want.abs().max()
    for a, b in zip(got, grads, strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()
    params = sum(p.numel() * 8 for p in mlp.parameters())
    assert peak_beyond(step, x, x, *mlp.parameters()) <= (1 << 20) + params
    assert peak_beyond(lambda: mlp(x), x) > 3_000 * WIDTH * 8  # stock forward alone


def test_token_tiles_under_autocast_do_not_grow_with_the_tiles():
    mlp, tiles = MLP(), TokenTiles(1 << 18)

    def peak(tokens):
        x, g = torch.randn(tokens, H, requires_grad=True), torch.randn(tokens, H)

        def step():
            with torch.autocast("cpu", torch.bfloat16):
                out = tiles(mlp, x)
            return torch.autograd.grad(out, (x, *mlp.parameters()), g), out

        return peak_beyond(step, x, x, *mlp.parameters())

    assert peak(4_000) <= 1.05 * peak(1_000)
