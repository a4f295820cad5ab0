"""States saved, loaded, exported, taken over; masters that have become stale."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from hf_longmoe.schedules.host import FakeEngine
from hf_longmoe.schedules.optimizer import OffloadStreamAdamW, state_bytes

MODES = ("accelerator", "cpu", "both", "auto")
HALF = (torch.bfloat16, torch.float16)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def again(run, seed, update_on=None, **caps):
    """A new optimizer, on copies of the parameters."""
    params = [nn.Parameter(p.detach().clone()) for p in run.params]
    caps = dict(bucket=4096, update_on=update_on or "cpu", engine=FakeEngine(seed)) | caps
    return params, OffloadStreamAdamW(run.groups(params, 1.0), **caps)


@pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)
@pytest.mark.parametrize("update_on", MODES)
@pytest.mark.parametrize("built", (False, True))
def test_a_resumed_run_is_bitwise_equal(pair, dtype, update_on, built):
    run = pair(dtype, update_on, bucket=4096)
    for _ in range(3):
        run.step()
    params, other = again(run, 9, update_on)
    if built:
        for param in params:
            param.grad = torch.randn_like(param)
        other.step()
        with torch.no_grad():
            for param, right in zip(params, run.params, strict=True):
                param.copy_(right)
    other.load_state_dict(through_a_file(run.ours.state_dict()))
    share = run.ours.param_groups[0]["accelerator_share"]
    assert [group["accelerator_share"] for group in other.param_groups] == [share] * 3
    assert (share is None) == (update_on in ("accelerator", "cpu"))
    assert other.param_groups[0]["lr"] == 1e-2 and other.param_groups[1]["eps"] == 1e-6
    for _ in range(3):
        run.gradients()
        for param, right in zip(params, run.params, strict=True):
            param.grad = right.grad
        run.plain.step()
        run.ours.step()
        other.step()
    run.params, run.ours = params, other
    run.check()


def test_a_view_saves_no_more_than_itself(pair):
    run = pair(torch.bfloat16, "cpu")
    run.step(missing=0)
    small = run.ours.state[run.params[0]]["exp_avg"]
    assert small.untyped_storage().nbytes() == 4
    file = io.BytesIO()
    torch.save(run.ours.state_dict(), file)
    assert file.tell() < 1.1 * 12 * sum(p.numel() for p in run.params) + 30_000


def test_loading_its_own_state_changes_nothing(pair):
    run = pair(torch.bfloat16, "cpu")
    run.step(missing=0)
    run.ours.load_state_dict(run.ours.state_dict())
    run.check()
    run.step()
    run.check()


@pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)
@pytest.mark.parametrize("fused", (None, True))
def test_from_and_to_a_plain_adamw(pair, dtype, fused):
    run = pair(torch.float32, "both", bucket=4096)
    run.step(missing=0)
    params, other = again(run, 5)
    for group in run.plain.param_groups:
        group["fused"] = fused
    other.load_state_dict(copy.deepcopy(run.plain.state_dict()))
    assert "fused" not in other.param_groups[0]
    run.ours, run.params, kept = other, params, run.params
    run.check()
    for group in run.plain.param_groups:
        group["fused"] = True
    run.step()
    run.check()
    exported = through_a_file(run.ours.plain_state_dict())
    for group in exported["param_groups"]:
        group["fused"] = True
    assert all(values.keys() == {"step", "exp_avg", "exp_avg_sq"} for values in exported["state"].values())
    theirs = [nn.Parameter(p.detach().clone()) for p in params]
    plain = torch.optim.AdamW(run.groups(theirs, 1.0))
    plain.load_state_dict(exported)
    run.gradients()
    for param, mine in zip(theirs, run.params, strict=True):
        param.grad = mine.grad
    plain.step()
    run.ours.step()
    run.plain.step()
    run.check()
    assert all(torch.equal(a, b) for a, b in zip(theirs, run.params, strict=True))
    assert len(kept) == len(params)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_moments_become_float32_and_masters_come_from_the_parameters(dtype):
    param = nn.Parameter(torch.randn(200).to(dtype))
    plain = torch.optim.AdamW([param])
    param.grad = torch.randn_like(param)
    plain.step()
    assert plain.state[param]["exp_avg"].dtype == dtype
    ours = OffloadStreamAdamW([param], engine=FakeEngine(), update_on="cpu")
    ours.load_state_dict(plain.state_dict())
    master = nn.Parameter(param.detach().float())
    expected = torch.optim.AdamW([master], fused=True)
    expected.load_state_dict(copy.deepcopy(plain.state_dict()))
    expected.param_groups[0]["fused"] = True
    param.grad = torch.randn_like(param)
    master.grad = param.grad.float()
    ours.step()
    expected.step()
    assert torch.equal(ours.state[param]["master"], master)
    assert ours.state[param]["exp_avg"].dtype == torch.float32
    assert torch.equal(ours.state[param]["exp_avg"], expected.state[master]["exp_avg"])


@pytest.mark.parametrize("steps", (0, 2))
def test_from_adamw_takes_the_place_of_a_plain_one(pair, steps):
    run = pair(torch.float32, "cpu")
    start = torch.optim.AdamW(run.groups(run.params, 1e-2), fused=True)
    calls = []
    start.register_step_post_hook(lambda *_: calls.append(1))
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (start, run.plain)]
    run.ours = start
    for _ in range(steps):
        run.step()
        [schedule.step() for schedule in schedules]
    groups, first = start.param_groups, start.param_groups[0]
    run.ours = OffloadStreamAdamW.from_adamw(start, bucket=4096, update_on="accelerator", engine=FakeEngine(3))
    assert run.ours.param_groups is groups and run.ours.param_groups[0] is first
    assert not start.state and len(run.ours.state) == (len([p for p in run.plain.state]) if steps else 0)
    run.ours.load_state_dict(run.ours.state_dict())
    assert run.ours.param_groups is groups and run.ours.param_groups[0] is first
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda text, *_, **__: pytest.fail(str(text)))
        for _ in range(3):
            run.step()
            [schedule.step() for schedule in schedules]
    run.check()
    assert len(calls) == steps + 3
    assert first["lr"] == 1e-2 * 0.5 ** (steps + 3)


def test_an_empty_state_loads_and_pickling_and_copying_keep_everything(pair):
    run = pair(torch.bfloat16, "cpu")
    run.ours.load_state_dict(run.ours.state_dict())
    run.ours.load_state_dict({"state": {}, "param_groups": run.ours.state_dict()["param_groups"]})
    run.step(missing=0)
    for copied in (pickle.loads(pickle.dumps(run.ours)), copy.deepcopy(run.ours)):
        params = [param for group in copied.param_groups for param in group["params"]]
        assert copied._caps == run.ours._caps and copied.param_groups[0]["lr"] == 1e-2
        for param, mine in zip(params, run.params, strict=True):
            assert torch.equal(param, mine)
            for key, value in run.ours.state[mine].items():
                assert torch.equal(copied.state[param][key], value)
            param.grad = torch.ones_like(param)
        copied.step()
    run.ours.load_state_dict({"state": {}, "param_groups": run.ours.state_dict()["param_groups"]})
    assert not run.ours.state
    run.plain.state.clear()
    for param, master in zip(run.params, run.masters, strict=True):
        master.data.copy_(param)
    run.step()
    run.check()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("update_on", MODES)
def test_a_parameter_changed_outside_is_taken_up(pair, dtype, update_on):
    run = pair(dtype, update_on)
    run.step()
    with torch.no_grad():
        for param, master in zip(run.params[3:5], run.masters[3:5], strict=True):
            param.mul_(3)
            master.copy_(param)
        run.params[7].data = run.params[7].data * 2  # another memory
        run.masters[7].copy_(run.params[7])
    run.step(missing=0)
    run.check()


def test_a_loaded_master_holds_whatever_has_happened_to_the_parameter(pair):
    run = pair(torch.bfloat16, "cpu")
    run.step(missing=0)
    state = copy.deepcopy(run.ours.state_dict())
    with torch.no_grad():
        run.params[3].zero_()
    run.ours.load_state_dict(state)
    with torch.no_grad():
        run.params[3].zero_()
    run.step(missing=0)
    run.check()
    with torch.no_grad():
        run.params[3].zero_()
        run.masters[3].zero_()
    run.step(missing=0)  # trusted once only
    run.check()


def test_resync(pair):
    run = pair(torch.float16, "accelerator")
    run.step(missing=0)
    for param, master in zip(run.params, run.masters, strict=True):
        param.data.mul_(2)
        master.data.copy_(param)
    run.ours.resync()
    run.step(missing=0)
    run.check()


def test_state_bytes_is_what_is_taken(pair):
    for dtype in (torch.float32, torch.bfloat16):
        run = pair(dtype, "accelerator")
        run.step()
        assert run.engine.host_bytes == state_bytes(run.params)


def test_everything_is_given_back(pair):
    for update_on in MODES:
        run = pair(torch.bfloat16, update_on)
        run.step()
        engine, run.ours = run.engine, None
        assert engine.host_bytes == engine.device_bytes == 0 and engine.waiting() == 0
