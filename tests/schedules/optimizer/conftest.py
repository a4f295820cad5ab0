"""Parameters of awkward sizes, a streaming optimizer on a fake device, and a fused AdamW on float32 copies."""

import random

import pytest
import torch
from torch import nn

from hf_longmoe.schedules.host import FakeEngine
from hf_longmoe.schedules.optimizer import OffloadStreamAdamW

SHAPES = ((1,), (63,), (65,), (100, 101), (7, 9, 5), (), (0,), (513,), (1000003 // 100,))


class Pair:
    """`ours` on `dtype` parameters, `plain` (fused AdamW) on their float32 copies; the same gradients for both."""

    def __init__(self, dtype, update_on, seed=0, bucket=16384, slots=2, shapes=SHAPES, engine="fake", lr=1e-2, **caps):
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.dtype = dtype
        self.params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.params]
        self.engine = FakeEngine(seed) if engine == "fake" else engine
        self.cap = bucket * slots
        caps = dict(bucket=bucket, slots=slots, update_on=update_on, engine=self.engine, **caps)
        self.ours = OffloadStreamAdamW(self.groups(self.params, lr), **caps)
        self.plain = torch.optim.AdamW(self.groups(self.masters, lr), fused=True)

    @staticmethod
    def groups(params, lr):
        third = len(params) // 3
        return [
            dict(params=params[:third], lr=lr, betas=(0.8, 0.95), weight_decay=0.3),
            dict(params=params[third : 2 * third], lr=3e-3, eps=1e-6),
            dict(params=params[2 * third :], lr=5e-2, weight_decay=0.0),
        ]

    def gradients(self, missing=0.2):
        for param, master in zip(self.params, self.masters, strict=True):
            param.grad = master.grad = None
            if self.random.random() >= missing:
                param.grad = torch.randn_like(param)
                master.grad = param.grad.float().clone()

    def step(self, missing=0.2):
        self.gradients(missing)
        self.plain.step()
        self.ours.step()

    def check(self):
        """Bitwise, state and parameters."""
        for param, master in zip(self.params, self.masters, strict=True):
            assert torch.equal(param, master.to(self.dtype))
            mine, other = self.ours.state.get(param), self.plain.state.get(master)
            assert (mine is None) == (not other)
            if mine is not None:
                expected = dict(other) if self.dtype == torch.float32 else {**other, "master": master.detach()}
                assert mine.keys() == expected.keys()
                for key, value in expected.items():
                    assert mine[key].shape == value.shape and torch.equal(mine[key], value), key


@pytest.fixture
def pair():
    return Pair
