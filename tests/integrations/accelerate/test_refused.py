"""What `LongMoEPlugin` refuses, before anything is prepared."""

import re

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longmoe import LongMoEConfig, LongMoEPlugin, OptimizerConfig
from hf_longmoe.schedules.host import FakeEngine


@pytest.fixture
def accelerator(run):
    return Accelerator(cpu=True)


@pytest.fixture
def layer():
    return torch.nn.Linear(2, 2)


@pytest.fixture
def model():
    options = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
    config = AutoConfig.for_model("mixtral", vocab_size=11, num_hidden_layers=2, num_local_experts=2, **options)
    return AutoModelForCausalLM.from_config(config).train()


def test_two_plugins(accelerator):
    first = LongMoEPlugin().install(accelerator)
    with pytest.raises(ValueError, match="has a LongMoEPlugin already"):
        LongMoEPlugin().install(accelerator)
    with pytest.raises(ValueError, match="installed on another Accelerator"):
        first.install(Accelerator(cpu=True))


def test_something_else_than_an_accelerator():
    with pytest.raises(ValueError, match="accelerator=Linear must be an accelerate.Accelerator"):
        LongMoEPlugin().install(torch.nn.Linear(1, 1))


def test_install_after_prepare(accelerator, layer):
    accelerator.prepare(layer)
    with pytest.raises(ValueError, match="comes before accelerator.prepare .* prepared 1 models and 0 optimizers"):
        LongMoEPlugin().install(accelerator)


OPTIMIZERS = {
    "torch.optim.sgd.SGD": lambda params: torch.optim.SGD(params, lr=1.0),
    "amsgrad=True": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "maximize=True": lambda params: torch.optim.AdamW(params, maximize=True),
    "foreach=True": lambda params: torch.optim.AdamW(params, foreach=True),
}


@pytest.mark.parametrize("words", OPTIMIZERS)
def test_optimizers(accelerator, layer, words):
    LongMoEPlugin().install(accelerator)
    with pytest.raises(ValueError, match=f"LongMoEPlugin: .*{re.escape(words)}.*LongMoEConfig\\(optimizer=None\\)"):
        accelerator.prepare(layer, OPTIMIZERS[words](layer.parameters()))
    assert not accelerator._models and not accelerator._optimizers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_memory_that_is_not_there(accelerator, layer, monkeypatch, dtype):
    monkeypatch.setattr("hf_longmoe.schedules.host.memory.host_memory_available", lambda: 40)
    LongMoEPlugin().install(accelerator)
    layer = layer.to(dtype)
    needed = "1 KiB" if dtype == torch.float32 else "1.5 KiB"  # 8 or 12 bytes for 2 times 64 elements
    with pytest.raises(MemoryError, match=f"needs {needed} of host memory, but 40 B are free"):
        accelerator.prepare(layer, torch.optim.AdamW(layer.parameters()))
    assert not accelerator._models


def early():
    return LongMoEPlugin(LongMoEConfig(optimizer=OptimizerConfig(early_gradients=True)), engine=FakeEngine())


def test_early_gradients(accelerator, layer):
    early().install(accelerator)
    with pytest.raises(ValueError, match="early_gradients=True: .*max_grad_norm=0"):
        accelerator.clip_grad_norm_(layer.parameters(), 1.0)
    accelerator.longmoe.remove()
    accelerator.clip_grad_norm_(layer.parameters(), 1.0)

    accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match='early_gradients=True: mixed_precision="fp16"'):
        early().install(accelerator)
    accelerator.scaler = None
    accelerator.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match="early_gradients=True: gradient_accumulation_steps=2"):
        early().install(accelerator)
    assert "longmoe" not in vars(accelerator)


def test_transformers_own_offload(accelerator, model):
    LongMoEPlugin().install(accelerator)
    accelerator.prepare(model)
    with pytest.raises(ValueError, match=r"activation_checkpointing_enable\(offload=True\) moves .*boundaries=None"):
        model.activation_checkpointing_enable(offload=True)
    assert not model.is_activation_checkpointing
    model.activation_checkpointing_enable()


def test_transformers_own_offload_that_is_on_already(accelerator, model):
    model.activation_checkpointing_enable(offload=True)
    LongMoEPlugin().install(accelerator)
    with pytest.raises(ValueError, match=r"activation_checkpointing_enable\(offload=True\) moves"):
        accelerator.prepare(model)
    assert "longmoe_checkpointing" not in vars(model)


def test_an_offload_around_the_model(accelerator, model):
    LongMoEPlugin().install(accelerator)
    model = accelerator.prepare(model)
    model.activation_checkpointing_enable()
    ids = torch.arange(8)[None]
    with torch.autograd.graph.save_on_cpu(), pytest.raises(ValueError, match="save_on_cpu, which is around"):
        model(input_ids=ids, labels=ids)


def test_checkpointing_of_an_old_format(accelerator, model, monkeypatch):
    monkeypatch.setattr(type(model), "_set_gradient_checkpointing", lambda self, module, value=False: None)
    LongMoEPlugin().install(accelerator)
    with pytest.raises(ValueError, match="MixtralForCausalLM has checkpointing in the format of Transformers 4.34"):
        accelerator.prepare(model)


def test_a_model_of_another_accelerators_plugin(accelerator, model):
    LongMoEPlugin().install(accelerator).config.boundaries  # noqa: B018
    accelerator.prepare(model)
    other = Accelerator(cpu=True)
    LongMoEPlugin().install(other)
    with pytest.raises(ValueError, match="offloaded already, by the LongMoEPlugin of another Accelerator"):
        other.prepare(model)
