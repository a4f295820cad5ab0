"""`LongMoEPlugin` on an Accelerator: the same bits, bounded bytes, everything back in place."""

import warnings

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint

from hf_longmoe import BoundariesConfig, LongMoEConfig, LongMoEPlugin, OffloadStreamAdamW, OptimizerConfig, patch_model
from hf_longmoe.integrations.transformers.regions import watch
from hf_longmoe.peaks import StorageProbe

STEPS = 4


@pytest.mark.parametrize("mode", ["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("patched", [False, True], ids=["stock", "patched"])
@pytest.mark.parametrize("update_on", ["accelerator", "cpu"])
def test_the_same_bits(run, plugin, same, update_on, patched, mode):
    want = run(patched=patched, mode=mode)
    losses = want.steps(STEPS)
    for seed in range(2):
        got = run(plugin(seed, update_on=update_on), patched, mode)
        assert got.steps(STEPS) == losses and same(got.weights(), want.weights())
        assert type(got.optimizer.optimizer) is OffloadStreamAdamW
        (installed,) = got.plugin._models
        offloaded = 0 if mode == "none" else 5  # of six boundaries, the last stays on the device
        assert installed.offload.offloaded == offloaded


@pytest.mark.parametrize("update_on", ["both", "auto"])
def test_any_division_of_the_update_has_the_same_bits(run, plugin, same, update_on):
    want = run()
    losses = want.steps(STEPS)
    got = run(plugin(update_on=update_on))
    assert got.steps(STEPS) == losses and same(got.weights(), want.weights())


def test_half_precision_has_masters(run, plugin):
    got = run(plugin(update_on="cpu"), dtype=torch.bfloat16)
    assert all(torch.isfinite(torch.tensor(got.steps(STEPS))))
    assert all(state["master"].dtype == torch.float32 for state in got.optimizer.state.values())


def test_a_prepared_model_on_the_host_copies_nothing(run, same):
    want = run()
    losses = want.steps(STEPS)
    got = run(LongMoEPlugin())
    assert got.steps(STEPS) == losses and same(got.weights(), want.weights())
    assert got.plugin._models[0].offload is None


def test_schedulers_do_not_warn(run, plugin):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(plugin()).steps(2)


@pytest.mark.parametrize("order", ["adapter first", "plugin first"])
def test_lora(run, plugin, order):
    def adapted(run):
        torch.manual_seed(1)
        return get_peft_model(run.model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    losses = []
    for one in (None, plugin(update_on="cpu")):
        trained = run(layers=3)
        accelerator = Accelerator(cpu=True)
        model = adapted(trained)
        if one is not None:
            one.install(accelerator)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, fused=True)
        trained.model, trained.optimizer = accelerator.prepare(model, optimizer)
        trained.accelerator, trained.scheduler = accelerator, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        losses.append(trained.steps(3))
    assert losses[0] == losses[1] and one._models[0].offload.offloaded == 2


def measured(run, layers, one, patched=True):
    """Component peaks of the third step. What a fake device has in host memory is not counted."""
    trained = run(one, patched, layers=layers)
    trained.steps(2)
    with StorageProbe() as probe, watch(trained.model, trained.optimizer):
        trained.steps(1)
    return probe.report().components


def test_peaks_do_not_grow_with_the_depth(run, plugin):
    one = 2 * 20 * 32 * 4  # bytes of a boundary of the third step
    kept = 2 * 20 * 2 * 4  # what a layer keeps of its routing, int32
    few, many = (measured(run, layers, plugin(update_on="cpu")) for layers in (8, 32))
    stock = measured(run, 32, None)["boundaries"].peak
    assert few["boundaries"].peak == many["boundaries"].peak <= 3 * (one + kept)
    assert stock >= 32 * one and many["boundaries"].peak <= 0.1 * stock
    for name in ("dispatch", "vocab", "layer"):  # nothing of a layer waits for backward on the device
        assert few[name].peak == many[name].peak > 0, name


def test_a_step_holds_its_slots(run, plugin):
    slots = measured(run, 4, plugin(update_on="accelerator", bucket="64KiB", slots=2))["optimizer"]
    assert 0 < slots.working <= slots.peak <= 2 * 64 * 1024 < measured(run, 4, None)["optimizer"].peak / 2


def test_nothing_of_the_state_stays_on_the_device(run, plugin):
    trained = run(plugin(update_on="accelerator", boundaries={"host_budget": 1}))
    trained.steps(2)
    engine = trained.plugin._engine
    assert 0 < engine.peak_device_bytes <= 2 * 16 * 1024
    trained.optimizer.optimizer.synchronize()
    assert engine.device_bytes == 0


@pytest.mark.parametrize("budget", [0, 3])
def test_boundaries_beyond_the_host_budget_stay(run, plugin, same, budget):
    want = run()
    losses = want.steps(1)
    one = 2 * 20 * 32 * 4
    got = run(plugin(boundaries={"host_budget": budget * one or 1}))
    assert got.steps(1) == losses
    offload = got.plugin._models[0].offload
    assert (offload.offloaded, offload.left) == (min(budget, 5), 6 - min(budget, 5))
    assert offload.host_bytes == min(budget, 5) * one


@pytest.mark.parametrize("patched", [False, True], ids=["stock", "patched"])
def test_remove_puts_everything_back(run, plugin, same, patched):
    want = run(patched=patched)
    losses = want.steps(STEPS)
    got = run(plugin(), patched)
    before = got.steps(2)
    engine = got.plugin._engine
    got.plugin.remove()
    assert engine.host_bytes == engine.device_bytes == 0
    assert type(got.optimizer.optimizer) is torch.optim.AdamW and got.optimizer.param_groups[0]["fused"]
    assert not {"longmoe", "prepare", "prepare_model"} & set(vars(got.accelerator))
    if not patched:
        assert "_set_gradient_checkpointing" not in vars(got.model)
        functions = [vars(m).get("_gradient_checkpointing_func") for m in got.model.model.layers]
        assert functions and all(getattr(function, "func", None) is checkpoint for function in functions)
    assert before + got.steps(2) == losses and same(got.weights(), want.weights())
    got.plugin.remove()  # once more changes nothing


def test_either_of_patch_and_plugin_comes_off_first(run, plugin, same):
    from hf_longmoe import unpatch_model

    for first, second in (("patch", "plugin"), ("plugin", "patch")):
        got = run(plugin(), patched=True)
        got.steps(1)
        for name in (first, second):
            unpatch_model(got.model) if name == "patch" else got.plugin.remove()
            got.steps(1)
        assert "_set_gradient_checkpointing" not in vars(got.model)
        assert "longmoe_checkpointing" not in vars(got.model)


def test_a_patch_after_the_plugin(run, plugin, same):
    want = run(patched=True)
    losses = want.steps(2)
    got = run(plugin())
    patch_model(got.model, want.model.longmoe.config)
    assert got.steps(2) == losses
    sent = got.plugin._models[0].offload.sent["down"]
    assert sent > 2 * 5 * 2 * 20 * 32 * 4, "the routing that layers keep travels with their boundaries"


def test_a_context_manager_removes_itself(run, plugin):
    with plugin() as one:
        trained = run(one)
        trained.steps(1)
    assert type(trained.optimizer.optimizer) is torch.optim.AdamW


def test_parts_that_are_off(run):
    off = LongMoEPlugin(LongMoEConfig(boundaries=None, optimizer=None))
    trained = run(off)
    assert type(trained.optimizer.optimizer) is torch.optim.AdamW
    assert "longmoe_checkpointing" not in vars(trained.model)


def test_caps_come_from_the_environment(monkeypatch):
    for name, value in {"OPTIMIZER_BUCKET": "2MiB", "OPTIMIZER_UPDATE_ON": "cpu", "BOUNDARIES_DEPTH": "2"}.items():
        monkeypatch.setenv(f"LONGMOE_{name}", value)
    monkeypatch.setenv("LONGMOE_BOUNDARIES_HOST_BUDGET", "8GiB")
    config = LongMoEPlugin().config
    assert config.optimizer == OptimizerConfig(bucket=2 << 20, update_on="cpu")
    assert config.boundaries == BoundariesConfig(host_budget=8 << 30, depth=2)
