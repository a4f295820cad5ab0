"""What a `LongMoEPlugin` may not break, nor keep: preparations that fail, what is dropped, copied, prepared again."""

import copy
import gc

import pytest
import torch
from accelerate import Accelerator

from hf_longmoe import LongMoEPlugin, OffloadStreamAdamW


def test_nothing_stays_of_what_is_dropped(run, plugin):
    one = plugin()
    trained = run(one, patched=True)
    trained.steps(2)
    assert one._engine.host_bytes > 0
    del trained.model, trained.optimizer, trained.scheduler, trained.prepared
    trained.accelerator.free_memory()
    gc.collect()
    assert one._engine.host_bytes == one._engine.device_bytes == 0 and str(one) == ""


def test_a_copy_of_a_model_can_be_prepared_too(run, plugin):
    trained = run(one := plugin())
    trained.steps(1)
    copied = trained.accelerator.prepare_model(copy.deepcopy(trained.model), evaluation_mode=True)
    ids = torch.arange(16).view(2, 8)
    copied(input_ids=ids, labels=ids).loss.backward()
    assert [installed.offload.offloaded for installed in one._models] == [5, 5]


def failing(*args, **kwargs):
    raise RuntimeError("as asked")


FAILURES = {
    "host memory": lambda monkeypatch, accelerator: monkeypatch.setattr(
        "hf_longmoe.schedules.host.memory.host_memory_available", lambda: 40
    ),
    "another optimizer": lambda monkeypatch, accelerator: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]),
    "in Accelerate": lambda monkeypatch, accelerator: monkeypatch.setattr(accelerator, "prepare_model", failing),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_preparation_that_fails_leaves_the_optimizer_its_state(run, plugin, monkeypatch, failure):
    trained = run()
    trained.steps(1)
    plain = trained.optimizer.optimizer
    before = copy.deepcopy(plain.state_dict()["state"])
    accelerator = Accelerator(cpu=True)
    one = plugin().install(accelerator)
    more = FAILURES[failure](monkeypatch, accelerator)
    with pytest.raises((ValueError, MemoryError, RuntimeError)):
        accelerator.prepare(trained.model, plain, *([more] if more is not None else []))
    after = plain.state_dict()["state"]
    assert len(after) == len(before) > 0 and not one._optimizers
    assert all(torch.equal(after[key]["exp_avg"], before[key]["exp_avg"]) for key in before)


def test_an_offload_that_is_on_is_refused_before_anything_is_prepared(run, plugin):
    model = run(mode="none").model
    model.activation_checkpointing_enable(offload=True)
    accelerator = Accelerator(cpu=True)
    one = plugin().install(accelerator)
    with pytest.raises(ValueError, match=r"activation_checkpointing_enable\(offload=True\) moves"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert not accelerator._models and not accelerator._optimizers and not one._optimizers


def test_an_optimizer_that_is_prepared_again(run, plugin):
    trained = run(plugin())
    trained.steps(1)
    streaming = trained.optimizer.optimizer
    assert trained.accelerator.prepare(streaming.replaces).optimizer is streaming and streaming.state
    trained.plugin.remove()
    trained.accelerator.free_memory()
    plugin().install(trained.accelerator)
    assert trained.accelerator.prepare(trained.optimizer) is trained.optimizer
    assert isinstance(trained.optimizer.optimizer, OffloadStreamAdamW) and trained.optimizer.state


def test_each_scheduler_waits_for_its_own_optimizer(run):
    accelerator = Accelerator(cpu=True)
    LongMoEPlugin().install(accelerator)
    optimizers = [torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()) for _ in range(2)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
    *optimizers, first, second = accelerator.prepare(*optimizers, *schedulers)
    assert first.optimizers == [optimizers[0]] and second.optimizers == [optimizers[1]]


def test_two_models_in_one_module(run, plugin):
    models = torch.nn.ModuleList([run().model, run().model])
    accelerator = Accelerator(cpu=True)
    one = plugin().install(accelerator)
    accelerator.prepare(models)
    ids = torch.arange(16).view(2, 8)
    sum(model(input_ids=ids, labels=ids).loss for model in models).backward()
    assert [installed.offload.offloaded for installed in one._models] == [5, 5]


def test_the_norm_that_a_trainer_logs_without_clipping(run, plugin):
    accelerator = Accelerator(cpu=True)
    plugin(early_gradients=True).install(accelerator)
    assert accelerator.clip_grad_norm_([], float("inf")).isnan()  # as the Trainer does with max_grad_norm=0
    with pytest.raises(ValueError, match="max_grad_norm=0"):
        accelerator.clip_grad_norm_([], 1.0)
