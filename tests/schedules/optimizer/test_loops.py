"""Training loops: closures, hooks, loss scaling, gradients that leave during backward, threads."""

import pytest
import torch
from torch import nn

from hf_longmoe.schedules.host import FakeEngine
from hf_longmoe.schedules.optimizer import OffloadStreamAdamW, update


def models(dtype=torch.float32):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(20, 31), nn.Tanh(), nn.Linear(31, 40, bias=False)).to(dtype)
    other = nn.Sequential(nn.Linear(20, 31), nn.Tanh(), nn.Linear(31, 40, bias=False)).to(dtype)
    other.load_state_dict(made.state_dict())
    return made, other


def loss(model, step):
    torch.manual_seed(step)
    return model(torch.randn(6, 20, dtype=next(model.parameters()).dtype)).float().square().mean()


def same(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def streaming(model, update_on="cpu", seed=0, **caps):
    return OffloadStreamAdamW(model.parameters(), bucket=2048, update_on=update_on, engine=FakeEngine(seed), **caps)


@pytest.mark.parametrize("update_on", ("accelerator", "cpu"))
def test_a_closure_and_hooks(update_on):
    model, other = models()
    ours, plain = streaming(model, update_on), torch.optim.AdamW(other.parameters(), fused=True)
    calls = []
    ours.register_step_pre_hook(lambda *_: calls.append("before"))
    ours.register_step_post_hook(lambda *_: calls.append("after"))

    def closure(model, optimizer):
        def run():
            optimizer.zero_grad()
            value = loss(model, 0)
            value.backward()
            return value

        return run

    for _ in range(3):
        assert torch.equal(ours.step(closure(model, ours)), plain.step(closure(other, plain)))
    assert same(model, other) and calls == ["before", "after"] * 3


@pytest.mark.parametrize("update_on", ("accelerator", "cpu", "both"))
def test_a_gradscaler_skips_steps_with_infinite_gradients(update_on):
    model, other = models()
    ours, plain = streaming(model, update_on), torch.optim.AdamW(other.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in range(2)]
    for step in range(5):
        for some, optimizer, scaler in zip((model, other), (ours, plain), scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss(some, step) * (float("inf") if step == 2 else 1.0)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(some.parameters(), 0.5)
            if optimizer is plain:  # fused, but not with the scaler's own arithmetic
                plain.param_groups[0]["fused"] = True
            scaler.step(optimizer)
            scaler.update()
    assert same(model, other) and scalers[0].get_scale() == scalers[1].get_scale() == 128.0
    assert all(values["step"] == 4 for values in ours.state.values())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("armed", (False, True))
@pytest.mark.parametrize("seed", range(4))
def test_early_gradients_leave_during_backward(dtype, armed, seed):
    model, other = models(dtype)
    ours = streaming(model, seed=seed, early_gradients=True)
    late = streaming(other, seed=seed)
    if armed:
        ours.arm()
    for step in range(6):
        loss(model, step).backward()
        loss(other, step).backward()
        if armed or step:
            assert all(param.grad is None for param in model.parameters())
        ours.step()
        late.step()
        late.zero_grad()
    assert same(model, other)
    loss(model, 9).backward()
    ours.zero_grad()  # forgotten
    before = [param.detach().clone() for param in model.parameters()]
    ours.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    ours.disarm()
    loss(model, 9).backward()
    assert all(param.grad is not None for param in model.parameters())


def test_early_gradients_refuse_what_needs_them_on_the_device():
    model, _ = models()
    with pytest.raises(ValueError, match="early_gradients=True"):
        streaming(model).arm()
    ours = streaming(model, early_gradients=True)
    ours.arm()
    loss(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"parameter 2 of group 0 .* has a second gradient before step\(\)"):
        loss(model, 1).backward()
    ours.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss(model, 0)).backward()
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(ours)
    ours.zero_grad()
    loss(model, 0).backward()
    next(model.parameters()).grad = torch.ones(31, 20)
    with pytest.raises(RuntimeError, match="has a gradient again after it travelled. DistributedDataParallel"):
        ours.step()


def test_threads_are_raised_for_the_hosts_update_and_restored(monkeypatch, caplog):
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert update.host_thread_count() == 3
        set_threads = torch.set_num_threads
        monkeypatch.setattr("torch.set_num_threads", lambda n: (seen.append(n), set_threads(n)))
        for engine in (FakeEngine(), None):
            param = nn.Parameter(torch.zeros(300_000))
            ours = OffloadStreamAdamW([param], update_on="cpu", engine=engine)
            with caplog.at_level("INFO"):
                for _ in range(2):
                    param.grad = torch.ones(300_000)
                    ours.step()
            # Where all of the training is on the host, it has the threads that it was given.
            assert seen == ([] if engine is None else [3, 1, 3, 1]) and torch.get_num_threads() == 1
            assert caplog.text.count("runs with 3 threads in place of 1") == (engine is not None)
            caplog.clear()
            seen.clear()
            if engine is not None:
                engine.fail_at = 1
                param.grad = torch.ones(300_000)
                with pytest.raises(RuntimeError):
                    ours.step()
                assert seen == [3, 1] and torch.get_num_threads() == 1
                seen.clear()
        small = nn.Parameter(torch.zeros(10))
        small.grad = torch.ones(10)
        OffloadStreamAdamW([small], update_on="cpu", engine=FakeEngine()).step()
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
        large = nn.Parameter(torch.zeros(300_000))
        large.grad = torch.ones(300_000)
        OffloadStreamAdamW([large], update_on="cpu", engine=FakeEngine()).step()
        assert seen == []  # not worth it; no more than there are
    finally:
        monkeypatch.undo()
        torch.set_num_threads(before)


def test_parameters_added_and_unfrozen_later(pair):
    run = pair(torch.bfloat16, "accelerator")
    run.step(missing=0)
    taken = run.engine.host_bytes
    for optimizer, params, grow in ((run.ours, run.params, nn.Parameter), (run.plain, run.masters, nn.Parameter)):
        torch.manual_seed(4)
        added = torch.randn(77)
        params.append(grow(added.bfloat16() if optimizer is run.ours else added.bfloat16().float()))
        optimizer.add_param_group({"params": params[-1:], "lr": 0.1})
    run.step(missing=0)
    run.check()
    assert run.engine.host_bytes == taken + 12 * 128
    assert run.ours.param_groups[3]["weight_decay"] == 1e-2


def test_timings(pair):
    run = pair(torch.float32, "both", bucket=4096)
    assert run.ours.timings is None
    for _ in range(2):
        run.step(missing=0)
    timings = run.ours.timings
    assert timings.nbytes["down"] / 1e9 == pytest.approx(timings.seconds["down"])  # the fake engine's claim
    assert timings.nbytes["up"] / 1e9 == pytest.approx(timings.seconds["up"])
    assert timings.serial == sum(timings.seconds.values()) and timings.shortest == max(timings.seconds.values())
    assert 1 <= timings.bound <= 4 and timings.step > timings.seconds["host"] > 0
    assert sum(timings.elements.values()) == sum(param.numel() for param in run.params)
