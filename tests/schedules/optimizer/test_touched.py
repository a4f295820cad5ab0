"""What a program does to the state and to the parameters between steps is followed, as a plain AdamW follows it."""

import pytest
import torch

from hf_longmoe.schedules.optimizer import OffloadStreamAdamW

MODES = ("accelerator", "cpu", "both", "auto")


@pytest.mark.parametrize("update_on", MODES)
def test_a_state_that_is_cleared_begins_anew(pair, update_on):
    run = pair(torch.float32, update_on)
    run.step()
    for optimizer in (run.ours, run.plain):
        optimizer.state.clear()
    run.step()
    run.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update_on", MODES)
def test_tensors_that_are_put_into_the_state_are_used(pair, dtype, update_on):
    run = pair(dtype, update_on)
    run.step(missing=0)
    for optimizer in (run.ours, run.plain):
        for values in optimizer.state.values():
            values["exp_avg"] = torch.full_like(values["exp_avg"], 0.25)
            values["step"] = torch.tensor(5.0)
    for _ in range(2):
        run.step(missing=0)
    run.check()


def test_what_is_put_into_the_state_is_checked(pair):
    run = pair(torch.float32, "cpu")
    run.step(missing=0)
    run.ours.state[run.params[1]]["exp_avg"] = torch.zeros(2)
    run.gradients(missing=0)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 1 of group 0 \(63,\) has shape \(2,\)"):
        run.ours.step()


@pytest.mark.parametrize("update_on", MODES)
def test_a_parameter_of_another_dtype_gets_another_place(pair, update_on):
    run = pair(torch.float32, update_on)
    run.step(missing=0)
    run.ours.synchronize()
    for param, master in zip(run.params, run.masters, strict=True):
        param.data = param.data.bfloat16()
        master.data = param.data.float()
    run.dtype = torch.bfloat16
    for _ in range(2):
        run.step(missing=0)
    run.check()


def test_a_parameter_of_another_size_is_refused(pair):
    run = pair(torch.float32, "cpu")
    run.step(missing=0)
    run.params[1].data, run.params[1].grad = torch.zeros(70), None
    run.params[1].grad = torch.ones(70)
    with pytest.raises(ValueError, match=r"has shape \(63,\) on this rank, the parameter \(70,\)"):
        run.ours.step()


def test_groups_added_to_one_that_took_a_place_are_whole(pair):
    """So that the plain one can have it back: every key that AdamW's own groups have."""
    run = pair(torch.float32, "cpu")
    ours = OffloadStreamAdamW.from_adamw(run.plain, engine=run.engine)
    ours.add_param_group(dict(params=[torch.nn.Parameter(torch.ones(3))]))
    assert ours.param_groups[-1].keys() == ours.param_groups[0].keys()
    assert ours.param_groups[-1]["fused"]
