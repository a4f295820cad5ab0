"""Clear errors, and failures that leave the counters right and the next step possible."""

import pytest
import torch
from torch import nn

from hf_longmoe.schedules.host import FakeEngine
from hf_longmoe.schedules.optimizer import OffloadStreamAdamW

MODES = ("accelerator", "cpu", "both", "auto")


def failure(optimizer):
    """What its step raises, without the frames, which hold its slots."""
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    pytest.fail("it did not fail")


def one():
    return [nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (dict(lr=-1.0), r"lr=-1.0 must be at least 0"),
        (dict(lr=torch.ones(2)), "tensor of one element"),
        (dict(betas=(0.9, 1.0)), r"betas\[1\]=1.0 must be at least 0 and below 1"),
        (dict(eps=-1.0), "eps=-1.0"),
        (dict(weight_decay=-1.0), "weight_decay=-1.0"),
        (dict(bucket="much"), "optimizer.bucket='much' is not a size"),
        (dict(bucket=1000), "bucket=1000 bytes is too small; give at least 1792 bytes"),
        (dict(slots=0), "optimizer.slots=0"),
        (dict(update_on="gpu"), "optimizer.update_on='gpu' is unknown"),
        (dict(early_gradients=True, update_on="both"), "early_gradients=True with update_on='both'"),
    ],
)
def test_arguments(values, words):
    with pytest.raises(ValueError, match=words):
        OffloadStreamAdamW(one(), **values)


@pytest.mark.parametrize("flag", ("amsgrad", "maximize", "foreach", "capturable", "differentiable"))
def test_flags_of_adamw(flag):
    plain = torch.optim.AdamW(one(), **{flag: True})
    with pytest.raises(ValueError, match=f"group 0 has {flag}=True"):
        OffloadStreamAdamW.from_adamw(plain)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (dict(amsgrad=True), "group 1 has amsgrad=True"),
        (dict(maximize=True), "group 1 has maximize=True"),
        (dict(lr=-1.0), "lr=-1.0 must be at least 0"),
        (dict(betas=(2.0, 0.9)), r"betas\[0\]=2.0"),
    ],
)
def test_groups(values, words):
    """Given at once, or added later."""
    with pytest.raises(ValueError, match=words):
        OffloadStreamAdamW([dict(params=one()), dict(params=one(), **values)])
    optimizer = OffloadStreamAdamW(one())
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group(dict(params=one(), **values))
    assert len(optimizer.param_groups) == 1


def test_other_classes():
    class Mine(torch.optim.AdamW):
        pass

    with pytest.raises(TypeError, match="Mine .a subclass of AdamW"):
        OffloadStreamAdamW.from_adamw(Mine(one()))
    with pytest.raises(TypeError, match="torch.optim.adam.Adam; .*plain torch.optim.AdamW"):
        OffloadStreamAdamW.from_adamw(torch.optim.Adam(one()))


def test_parameters_and_gradients():
    for param, words in (
        (nn.Parameter(torch.ones(3, dtype=torch.float64)), "embed.* is torch.float64"),
        (nn.Parameter(torch.ones(3, dtype=torch.complex64)), "embed.* is torch.complex64"),
        (nn.Parameter(torch.ones(3, device="meta")), "embed.* is on the meta device"),
        (nn.Parameter(torch.ones(3, 4)[:, ::2]), "embed.* does not fill its memory"),
    ):
        with pytest.raises(ValueError, match=words):
            OffloadStreamAdamW([("embed", param)]).step()
    embedding = nn.Embedding(5, 3, sparse=True)
    ours = OffloadStreamAdamW(embedding.named_parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="gradient of weight .5, 3. is torch.sparse_coo"):
        ours.step()
    assert not ours.state


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["state"][0].pop("exp_avg"), "lacks exp_avg"),
        (lambda s: s["state"][0].update(max_exp_avg_sq=torch.ones(3)), "has max_exp_avg_sq"),
        (
            lambda s: s["state"][0].update(exp_avg=torch.ones(4)),
            r"exp_avg of parameter 0 .* has shape \(4,\)",
        ),
        (lambda s: s["param_groups"][0].update(amsgrad=True), "amsgrad=True"),
        (lambda s: s["param_groups"][0].update(params=[0, 1]), r"groups of \[2\] parameters"),
        (lambda s: s["param_groups"].append(s["param_groups"][0]), r"groups of \[1, 1\] parameters"),
    ],
)
def test_states_that_do_not_fit_change_nothing(change, words):
    params = one()
    ours = OffloadStreamAdamW(params, lr=0.5)
    params[0].grad = torch.ones(3)
    ours.step()
    state = ours.state_dict()
    state["state"] = {0: {key: value.clone() + 1 for key, value in state["state"][0].items()}}
    state["param_groups"][0]["lr"] = 7.0
    change(state)
    with pytest.raises(ValueError, match=words):
        ours.load_state_dict(state)
    assert ours.param_groups[0]["lr"] == 0.5 and ours.state[params[0]]["step"] == 1


def test_too_little_host_memory_is_said_before_anything_is_changed(pair, monkeypatch):
    run = pair(torch.bfloat16, "accelerator")
    run.engine.host_limit = 200_000
    run.gradients(0)
    before = [param.detach().clone() for param in run.params]
    with pytest.raises(MemoryError, match="bytes of host memory are not there"):
        run.ours.step()
    assert run.engine.host_bytes == 0 and not run.ours.state
    assert all(torch.equal(a, b) for a, b in zip(before, run.params, strict=True))
    monkeypatch.setattr("hf_longmoe.schedules.host.memory.host_memory_available", lambda: 1000)
    with pytest.raises(MemoryError, match="state of OffloadStreamAdamW needs .* host memory, but 1000 B are free"):
        run.ours.step()
    monkeypatch.undo()
    run.engine.host_limit = None
    run.plain.step()
    run.ours.step()
    run.check()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("update_on", MODES)
def test_a_failed_copy_leaves_the_counters_right_and_the_next_step_possible(pair, dtype, update_on):
    run = pair(dtype, update_on, bucket=4096)
    run.step(missing=0)
    counts = {}
    for at in (0, 1, 2, 5, 11, 30):
        state = {key: value for key, value in run.ours.state.items()}
        steps = [float(state[param]["step"]) for param in run.params]
        before = [(param.detach().clone(), state[param]["exp_avg"].clone()) for param in run.params]
        run.gradients(0)
        run.engine.fail_at = at
        text = failure(run.ours)
        assert text.startswith("OffloadStreamAdamW.step() failed: the copy ")
        assert run.engine.fail_at is None and run.engine.waiting() == 0
        assert run.engine.device_bytes == 0
        counted = 0
        for number, (param, (value, moment)) in enumerate(zip(run.params, before, strict=True)):
            rose = float(run.ours.state[param]["step"]) - steps[number]
            moved = (run.ours.state[param]["exp_avg"] != moment).float()
            if f"parameter {number % 3} of group {number // 3} " in text.partition("Half done")[2]:
                assert rose == 0
            elif param.numel():
                assert moved.mean() > 0.99 if rose else not moved.any() and torch.equal(value, param)
            counted += rose
        assert f"Of 9 parameters {counted:.0f} are updated" in text
        counts[at] = counted
    assert len(set(counts.values())) > 1 or update_on == "auto"
    run.gradients(0)
    run.ours.step()


def test_after_a_failure_before_any_update_the_run_is_as_if_it_had_not_been(pair):
    run = pair(torch.bfloat16, "accelerator")
    run.step(missing=0)
    run.gradients(0)
    run.engine.fail_at = 0
    with pytest.raises(RuntimeError, match="None is half done"):
        run.ours.step()
    run.plain.step()
    run.ours.step()
    run.check()
    run.step()
    run.check()


def test_a_first_step_that_fails_takes_masters_from_the_parameters_again(pair):
    run = pair(torch.bfloat16, "accelerator", shapes=[(700,), (300,)], bucket=4096)
    run.gradients(0)
    run.engine.fail_at = 5  # of the first bucket's way back
    with pytest.raises(RuntimeError, match="Half done"):
        run.ours.step()
    run.ours.step()
    for param in run.params:
        assert torch.equal(run.ours.state[param]["master"].to(run.dtype), param)
        assert param.detach().abs().max() > 0.1


def test_two_devices(monkeypatch):
    monkeypatch.setattr("hf_longmoe.schedules.optimizer.book.has_own_memory", lambda device: True)
    ours = OffloadStreamAdamW(one(), engine=FakeEngine())
    with pytest.raises(ValueError, match="Parameters are on cpu, cuda:1; an OffloadStreamAdamW serves one"):
        ours._book._find_engine({torch.device("cuda:1")})
