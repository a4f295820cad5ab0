"""What these tests share: LoRA with factors that do something, a step, and how to compare gradients."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch.nn import functional as F
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture
def caps():
    """A few rows a wave, a few tokens a tile; `caps(**dispatch)`."""
    return lambda **dispatch: LongMoEConfig(
        dispatch=DispatchConfig(**{"budget": "24KiB", **dispatch}), vocab=VocabConfig(budget="16KiB")
    )


@pytest.fixture
def lora():
    """`lora(model, **LoraConfig)`: experts by default; `B` is not zero."""

    def lora(model, **options):
        torch.manual_seed(5)
        options = {"r": 3, "lora_alpha": 6, "target_modules": [], "target_parameters": EXPERTS, **options}
        return get_peft_model(model, LoraConfig(init_lora_weights=False, **options))

    return lora


@pytest.fixture
def several(lora):
    """`several(model, **LoraConfig)`: of `lora`, with a second adapter of its own values, "other"."""

    def several(model, **options):
        model = lora(model, **options)
        model.add_adapter("other", model.peft_config["default"])
        torch.manual_seed(6)
        for name, param in model.named_parameters():
            if ".other." in name:
                torch.nn.init.normal_(param, std=0.2)
        return model

    return several


@pytest.fixture
def wrapped():
    """
    `wrapped(seed, factors=torch.float32, dtype=torch.bfloat16, family="qwen3_moe", **config)`: an experts module alone
    in its two wrappers; `factors` is the dtype of those of LoRA.
    """

    def wrapped(seed, factors=torch.float32, dtype=torch.bfloat16, family="qwen3_moe", **config):
        torch.manual_seed(seed)
        kinds = {"qwen3_moe": Qwen3MoeExperts, "gpt_oss": GptOssExperts}
        sizes = dict(hidden_size=64, num_experts_per_tok=2, num_experts=8, num_local_experts=8) | config
        width = sizes.pop("width", 48)
        config = AutoConfig.for_model(family, moe_intermediate_size=width, intermediate_size=width, **sizes)
        config._experts_implementation = "grouped_mm"
        experts = kinds[family](config)
        for param in experts.parameters():
            torch.nn.init.normal_(param, std=0.12)
        experts = experts.to(dtype).requires_grad_(False)
        for name in ("gate_up_proj", "down_proj"):
            experts = ParamWrapper(experts, "default", name, LoraConfig(init_lora_weights=False), r=8, lora_alpha=16)
        for name, param in experts.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(param.requires_grad_(), std=0.1)
                param.data = param.data.bfloat16().to(factors)
        return experts

    return wrapped


@pytest.fixture
def step():
    """`step(model, batch, stock=False)` -> loss and gradients; the stock loss in the dtype of the logits."""

    def step(model, batch, stock=False):
        model.zero_grad()
        if stock:
            logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        else:
            loss = model(**batch).loss
        loss.backward()
        return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    return step


@pytest.fixture
def assert_same():
    """`assert_same(got, want, tolerance=1e-12)`: two dicts of tensors, relative to the largest element of each."""

    def assert_same(got, want, tolerance=1e-12):
        assert got.keys() == want.keys() and len(want) > 1
        for name in want:
            difference, scale = (got[name] - want[name]).abs().max(), want[name].abs().max()
            assert scale > 0 and difference <= tolerance * scale, f"{name}: {difference / scale:.1e}"

    return assert_same
