"""A small Mixtral under an Accelerator, with and without the plugin, on a fake device."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longmoe import (
    BoundariesConfig,
    DispatchConfig,
    LongMoEConfig,
    LongMoEPlugin,
    OptimizerConfig,
    VocabConfig,
    patch_model,
)
from hf_longmoe.schedules.host import FakeEngine

LAYERS = 6


class Run:
    """One training run in this process."""

    def __init__(self, plugin=None, patched=False, mode="non-reentrant", layers=LAYERS, dtype=torch.float32, **config):
        torch.manual_seed(0)
        options = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
        options |= dict(vocab_size=101, num_local_experts=4, num_hidden_layers=layers)
        config = AutoConfig.for_model("mixtral", use_cache=False, **options, **config)
        self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        if patched:
            caps = dict(dispatch=DispatchConfig(budget="256KiB"), vocab=VocabConfig(budget="64KiB"))
            patch_model(self.model, LongMoEConfig(**caps))
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True)
        self.plugin = plugin and plugin.install(self.accelerator)
        plain = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1 / (1 + step))
        self.prepared = self.accelerator.prepare(self.model, plain, schedule)
        self.optimizer, self.scheduler = self.prepared[1:]
        if mode != "none":
            self.model.activation_checkpointing_enable({"use_reentrant": mode == "reentrant"})
        self.at = 0

    def steps(self, count):
        """The losses."""
        losses = []
        for _ in range(count):
            generator = torch.Generator().manual_seed(self.at)
            ids = torch.randint(101, (2, 20 + 3 * (self.at % 2)), generator=generator)
            loss = self.model(input_ids=ids, labels=ids).loss
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            self.at += 1
        return losses

    def weights(self):
        return [param.detach().clone() for param in self.model.parameters()]


@pytest.fixture
def run():
    yield Run
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def plugin():
    """`plugin(**fields)`: on a fake device, with caps that a small model passes."""

    def plugin(seed=0, boundaries=None, **optimizer):
        config = LongMoEConfig(
            boundaries=BoundariesConfig(**(boundaries or {})),
            optimizer=OptimizerConfig(**{"bucket": "16KiB", **optimizer}),
        )
        return LongMoEPlugin(config, engine=FakeEngine(seed))

    return plugin


@pytest.fixture
def same():
    def same(a, b):
        return len(a) == len(b) > 0 and all(map(torch.equal, a, b))

    return same
