"""A default device of the user's is not where host memory is."""

import pytest
import torch

from hf_longmoe.schedules.host import FakeEngine
from hf_longmoe.schedules.host.accelerator import _host_memory
from hf_longmoe.schedules.optimizer import OffloadStreamAdamW


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update_on", ["cpu", "accelerator"])
def test_host_memory_is_the_hosts(update_on, dtype):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(500).to(dtype)) for _ in range(2)]
    for param in params:
        param.grad = torch.randn(500).to(dtype)
    optimizer = OffloadStreamAdamW(params, bucket="4KiB", update_on=update_on, engine=FakeEngine())
    before = [param.detach().clone() for param in params]
    with torch.device("meta"):
        optimizer.step()
        memory = _host_memory(8)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    optimizer.synchronize()
    assert memory.device.type == "cpu"
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert tensors and all(tensor.device.type == "cpu" for tensor in tensors)
    assert not any(torch.equal(a, b) for a, b in zip(before, params, strict=True))
