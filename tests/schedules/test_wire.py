"""What a collective holds on to, on a group of one."""

import gc
import weakref

import pytest
import torch
from torch import distributed

from hf_longmoe.schedules.wire import GroupWire


@pytest.fixture
def wire(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield GroupWire(distributed.group.WORLD)
    distributed.destroy_process_group()


def test_nothing_is_kept_once_it_has_been_waited_for(wire):
    sent = torch.arange(6.0).view(3, 2)
    kept = weakref.ref(sent.untyped_storage())
    pending = wire.exchange(sent, [3], [3])
    del sent
    received = pending.wait()
    assert received.tolist() == [[0, 1], [2, 3], [4, 5]]
    came = weakref.ref(received.untyped_storage())
    del received
    gc.collect()
    assert kept() is None and came() is None, f"{pending} holds them"


def test_only_what_goes_to_others_is_counted(wire):
    wire.exchange(torch.ones(3, 2), [3], [3]).wait()
    assert wire.gather(torch.tensor([4, 5])) == [[4, 5]]
    assert wire.sent_bytes == 0
