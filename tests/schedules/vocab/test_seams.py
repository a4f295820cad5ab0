"""Where the schedule meets the rest of torch: fake tensors, checkpointing, saved-tensor hooks, no host reads."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hf_longmoe.schedules.vocab import LogitTransform, labels, linear_cross_entropy, token_log_probs

T, H, V = 40, 16, 101


def make():
    torch.manual_seed(0)
    hidden = torch.randn(T, H).requires_grad_()
    return hidden, torch.randn(V, H).requires_grad_(), torch.randint(0, V, (T,))


@pytest.mark.parametrize("count", [T, T // 2, 0])
@pytest.mark.parametrize("call", [linear_cross_entropy, token_log_probs])
def test_runs_without_data_once_the_count_is_given(monkeypatch, call, count):
    monkeypatch.setattr(labels, "read_counts", lambda *_: (count, None))
    with FakeTensorMode():
        hidden, weight, targets = make()
        call(hidden, weight, targets, budget="16KiB", transform=LogitTransform(softcap=5.0)).sum().backward()
    assert hidden.grad.shape == hidden.shape and weight.grad.shape == weight.shape


class HostReads(TorchFunctionMode):
    """The calls that wait for a device."""

    NAMES = {"tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"}

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        if name in self.NAMES:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [0, 13])
def test_values_are_read_once_whatever_the_number_of_tiles(masked):
    hidden, weight, targets = make()
    targets[:masked] = -100
    with HostReads() as mode:
        loss, _ = linear_cross_entropy(
            hidden, weight, targets, budget="16KiB", num_items=torch.tensor(31), z_loss=0.1, statistics=True
        )
        loss.backward()
    assert mode.reads == ["tolist"]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("call", [linear_cross_entropy, token_log_probs])
def test_inside_a_checkpoint(call, use_reentrant):
    hidden, weight, targets = make()

    def step(hidden):
        return call(hidden.tanh(), weight, targets, budget="16KiB").sum()

    expected = torch.autograd.grad(step(hidden), (hidden, weight))
    checkpoint(step, hidden, use_reentrant=use_reentrant).backward()
    assert torch.equal(hidden.grad, expected[0]) and torch.equal(weight.grad, expected[1])


def test_only_inputs_and_the_log_sum_exp_are_saved():
    hidden, weight, targets = make()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        linear_cross_entropy(hidden, weight, targets, budget="16KiB").backward()
        assert saved == []
        token_log_probs(hidden, weight, targets, budget="16KiB").sum().backward()
    assert saved == [(T, H), (V, H), (T,)]


def test_inference_mode():
    hidden, weight, targets = make()
    expected = linear_cross_entropy(hidden, weight, targets, budget="16KiB")
    with torch.inference_mode():
        assert torch.equal(linear_cross_entropy(hidden, weight, targets, budget="16KiB"), expected)
