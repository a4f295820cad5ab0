"""Bitwise equal to `torch.optim.AdamW(fused=True)`, whatever the copies do, within the cap on device memory."""

import pytest
import torch

from hf_longmoe.schedules.host import FakeEngine

MODES = ("accelerator", "cpu", "both", "auto")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("update_on", MODES)
def test_fifty_steps_with_schedule_clipping_accumulation_and_missing_gradients(pair, dtype, update_on):
    run = pair(dtype, update_on)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 1 / (1 + n), lambda n: 0.9**n, lambda n: 1.0])
        for optimizer in (run.ours, run.plain)
    ]
    run.params[1].requires_grad_(False)  # frozen until step 20
    run.masters[1].requires_grad_(False)
    for step in range(50):
        if step == 20:
            run.params[1].requires_grad_()
            run.masters[1].requires_grad_()
        run.gradients()
        if step < 20:
            run.params[1].grad = run.masters[1].grad = None
        if step % 3 == 0:  # accumulated, and clipped: in place, in the parameters' dtype
            for param in run.params:
                if param.grad is not None:
                    param.grad += torch.randn_like(param)
            torch.nn.utils.clip_grad_norm_(run.params, 1.0)
            for param, master in zip(run.params, run.masters, strict=True):
                master.grad = None if param.grad is None else param.grad.float().clone()
        run.plain.step()
        run.ours.step()
        assert run.engine.device_bytes == 0
        for schedule in schedules:
            schedule.step()
        run.ours.zero_grad()
        assert all(param.grad is None for param in run.params)
    run.check()
    assert 0 < run.engine.peak_device_bytes <= run.cap
    elements = run.ours.timings.elements
    assert (elements["accelerator"] > 0) >= (update_on in ("accelerator", "both"))
    assert (elements["host"] > 0) >= (update_on in ("cpu", "both"))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("update_on", MODES)
def test_any_delays_slots_and_buckets(pair, update_on, seed):
    engine = FakeEngine(seed, eager=(0.0, 0.3, 0.9)[seed % 3])
    dtype, slots, bucket = DTYPES[seed % 3], 1 + seed % 4, (2048, 4096, 10_000, 32_768)[seed // 2]
    run = pair(dtype, update_on, seed, bucket, slots, engine=engine)
    for _ in range(4):
        run.step()
        assert engine.device_bytes == 0
    run.check()
    assert engine.peak_device_bytes <= run.cap
    assert engine.waiting() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_where_parameters_are_on_the_host(pair, dtype):
    run = pair(dtype, "auto", engine=None)
    for _ in range(10):
        run.step()
    run.check()
    timings = run.ours.timings
    assert timings.nbytes == {"down": 0, "up": 0} and timings.elements["host"] > 0
    assert run.ours.last_event is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_state_that_fits_the_slots_stays_on_the_device(pair, dtype, caplog):
    with caplog.at_level("INFO"):
        run = pair(dtype, "auto", bucket=2**20)
        for _ in range(4):
            run.step()
    run.check()
    assert [record for record in caplog.records if "stays there" in record.message][1:] == []
    assert caplog.text.count("stays there") == 1
    assert run.engine.sent == {"down": 0, "up": 0} and run.engine.host_bytes == 0
    assert 0 < run.engine.device_bytes <= run.engine.peak_device_bytes <= run.cap


@pytest.mark.parametrize("update_on", MODES)
def test_memory_orders_and_gradients_of_another_dtype(pair, update_on):
    run = pair(torch.float32, update_on, shapes=[(33, 70), (33, 70), (4, 6, 8, 9), (2000,)], bucket=4096)
    made = run.engine
    for number, permutation in ((0, (1, 0)), (2, (0, 2, 3, 1))):
        for some in (run.params, run.masters):  # channels last and the like
            data = some[number].data
            order = [permutation.index(dim) for dim in range(data.dim())]
            some[number].data = data.permute(permutation).contiguous().permute(order)
    assert not run.params[2].is_contiguous()
    for _ in range(3):
        run.gradients(0)
        run.params[1].grad = run.params[1].grad.t().contiguous().t()  # in another order than its parameter
        half, run.params[3].grad = run.params[3].grad.bfloat16(), None
        run.params[3].grad_dtype = torch.bfloat16
        run.params[3].grad = half
        run.masters[3].grad = half.float()
        run.plain.step()
        run.ours.step()
        run.params[3].grad = None
        run.params[3].grad_dtype = torch.float32
    run.check()
    assert run.ours.state[run.params[2]]["exp_avg"].stride() == run.params[2].stride()
    assert made.peak_device_bytes <= run.cap


def test_small_tensors_share_a_transfer(pair):
    adapters = pair(torch.float32, "accelerator", shapes=[(8, 8)] * 50, bucket=65_536)
    adapters.step(missing=0)
    adapters.ours.synchronize()
    jobs = [stage for stage, _ in adapters.ours._last.jobs]
    assert jobs.count("up") == jobs.count("down") == 2  # two moments, one bucket
    adapters.check()
    scattered = pair(torch.bfloat16, "cpu", shapes=[(8, 8)] * 50, bucket=65_536)
    scattered.step(missing=0)
    scattered.step(missing=0)
    jobs = [stage for stage, _ in scattered.ours._last.jobs]
    assert jobs.count("up") == jobs.count("down") == 1
    scattered.check()


def test_lr_as_a_tensor_and_new_numbers_count_from_the_next_step(pair):
    run = pair(torch.bfloat16, "accelerator", lr=torch.tensor(1e-2))
    run.step()
    for optimizer in (run.ours, run.plain):
        optimizer.param_groups[0]["lr"].fill_(0.5)
        optimizer.param_groups[1]["betas"] = (0.5, 0.6)
        optimizer.param_groups[2]["weight_decay"] = 0.9
        optimizer.param_groups[2]["eps"] = 1e-3
    run.step()
    run.check()


def test_bytes_on_the_link(pair):
    numel, padded = 10_000, 10_048
    for dtype, update_on, down, up in (
        (torch.float32, "accelerator", 8 * padded, 8 * padded),
        (torch.bfloat16, "accelerator", 12 * padded, 12 * padded),
        (torch.float32, "cpu", 8 * numel, 4 * numel),
        (torch.bfloat16, "cpu", 2 * numel, 2 * numel),
    ):
        run = pair(dtype, update_on, shapes=[(numel,)])
        run.step(missing=0)  # the first makes masters
        before = dict(run.engine.sent)
        run.step(missing=0)
        sent = {way: run.engine.sent[way] - before[way] for way in before}
        assert sent == {"down": down, "up": up} == run.ours.timings.nbytes
        kinds = 3 if dtype == torch.bfloat16 else 2
        assert run.engine.host_bytes >= 4 * padded * kinds
