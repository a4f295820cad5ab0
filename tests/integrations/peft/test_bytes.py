"""What a MoE block with LoRA on its experts holds, counted storage by storage, against stock PEFT."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_longmoe.integrations.peft import ExpertAdapters
from hf_longmoe.integrations.transformers.experts import block_of, patch_experts
from hf_longmoe.peaks import StorageProbe
from hf_longmoe.schedules.dispatch import LocalDispatch
from hf_longmoe.schedules.replay import checkpoint_once

H, E, K = 128, 16, 2


@pytest.mark.parametrize(
    ("family", "dtype", "kernel"),
    [
        ("qwen3_moe", torch.float32, "auto"),
        ("gpt_oss", torch.float32, "auto"),
        ("qwen3_moe", torch.bfloat16, "auto"),
        ("gpt_oss", torch.float32, "model"),
    ],
)
def test_the_budget_holds_and_is_a_fifth_of_stock_at_most(wrapped, family, dtype, kernel):
    sizes = dict(hidden_size=H, num_experts=E, num_local_experts=E, width=96)

    def peak(experts, tokens):
        torch.manual_seed(0)
        x, w = torch.randn(tokens, H).to(dtype).requires_grad_(), torch.rand(tokens, K).to(dtype).requires_grad_()
        g, index = torch.randn(tokens, H).to(dtype), torch.rand(tokens, E).topk(K)[1]
        trained = [p for n, p in experts.named_parameters() if "lora_" in n]

        def step():
            region = checkpoint_once(lambda x, w: experts(x, index, w))
            out = checkpoint(region, x, w, use_reentrant=False)
            return torch.autograd.grad(out, (x, w, *trained), g), out

        with StorageProbe() as probe:
            kept = step()
        del kept
        return probe.report().total - sum(t.numel() * t.element_size() for t in (x, x, *trained))

    stock, ours = (wrapped(0, torch.float32, dtype, family, **sizes) for _ in range(2))
    base, budget = ours.get_base_layer(), 400_000
    schedule = LocalDispatch(budget, output_saved_after=False)
    patch_experts(base, schedule, kernel)
    adapters = ExpertAdapters([ours, ours.base_layer])
    adapters.install(base)
    block, params = block_of(base, kernel, adapters.active())
    half = sum(p[0].numel() * 4 for p in params if p.requires_grad) if dtype == torch.bfloat16 else 0
    few, many = peak(ours, 300), peak(ours, 1_200)
    for tokens, found in ((300, few), (1_200, many)):
        assert found <= budget + block.beside_rows(params, budget) + half + 24 * tokens * K
    assert many >= 0.35 * budget
    whole = peak(stock, 1_200)
    print(f"stock {whole / 2**20:.2f} MiB, ours {many / 2**20:.2f} MiB: {1 - many / whole:.1%} less")
    assert many <= 0.2 * whole
