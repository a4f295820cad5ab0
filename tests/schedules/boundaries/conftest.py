"""A small residual stack with dropout, and a fake device that tells at each of its calls what is alive on it."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from hf_longmoe.schedules.boundaries import BoundaryOffload
from hf_longmoe.schedules.host import FakeEngine
from hf_longmoe.schedules.replay import checkpoint_once, pin_top_k

WIDTH = 16


class WatchedEngine(FakeEngine):
    """`watch()` is called at every call; `log`: what was asked for, and which copy was waited for."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.watch, self.log, self._names, self._count = lambda: None, [], {}, Counter()

    def _drift(self):
        super()._drift()
        self.watch()

    def _copy(self, stream, destination, source, after):
        job = super()._copy(stream, destination, source, after)
        self._names[id(job)] = job, f"{stream} {self._count[stream]}"
        self._count[stream] += 1
        self.log.append(self._names[id(job)][1])
        return job

    def compute_waits(self, job):
        self.log.append("compute waits " + self._names[id(job)][1])
        super().compute_waits(job)

    def empty(self, numel, dtype):
        memory = super().empty(numel, dtype)
        self.watch()
        return memory


class Layer(nn.Module):
    """Residual, with dropout; `routed`: the two best of its columns are taken by a pinned top-k."""

    def __init__(self, routed=False):
        super().__init__()
        self.linear, self.routed = nn.Linear(WIDTH, WIDTH), routed

    def forward(self, x, scale):
        h = self.linear(torch.tanh(x))
        if self.routed:
            pin_top_k(True)
            values, chosen = h.topk(4, dim=-1)
            pin_top_k(False)
            h = torch.zeros_like(h).scatter(-1, chosen, values)
        return x + nn.functional.dropout(h, 0.2) * scale


class Stack(nn.Module):
    """`births`: is given each layer's input, and each layer's output but the last as soon as it exists."""

    def __init__(self, layers=5, dtype=torch.float32, reentrant=False, offload=None, routed=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(routed) for _ in range(layers)])
        self.embed = nn.Embedding(11, WIDTH)
        self.to(dtype)
        self.reentrant, self.offload, self.births = reentrant, offload, lambda tensor: None
        self.scale = torch.tensor(1.5, dtype=dtype)

    def forward(self, ids):
        if self.offload is not None:
            self.offload.begin()
        x = self.embed(ids)
        self.births(x)
        for layer in self.layers:

            def region(x, scale, layer=layer):
                out = layer(x, scale)
                if layer is not self.layers[-1] and torch._C._current_graph_task_id() == -1:
                    self.births(out)
                return out

            x = self.call(region, x, self.scale)
        return x.float().square().sum()

    def call(self, region, *args):
        store = None if self.offload is None else self.offload.store
        run = partial(checkpoint, use_reentrant=self.reentrant)
        if self.layers[0].routed:
            region = checkpoint_once(region, store=store)
        return run(region, *args) if self.offload is None else self.offload.checkpoint(run, region, *args)

    def gradients(self):
        found = [parameter.grad.clone() for parameter in self.parameters()]
        self.zero_grad()
        return found


class Alive:
    """How many boundaries of `nbytes` are on the device, now and at most: inputs of layers and what came back."""

    def __init__(self, engine, nbytes):
        self.engine, self.nbytes, self.most = engine, nbytes, 0
        self._born = []
        engine.watch = self.look

    def born(self, tensor):
        self._born.append(StorageWeakRef(tensor.untyped_storage()))
        self.look()

    def now(self):
        self._born = [ref for ref in self._born if not ref.expired()]
        return len(self._born) + self.engine.device_bytes / self.nbytes

    def look(self):
        self.most = max(self.most, self.now())


def train(stack, ids, seed=7):
    """Loss and gradients of one step."""
    torch.manual_seed(seed)
    loss = stack(ids)
    loss.backward()
    return loss.detach(), *stack.gradients()


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def kit():
    """The names above, for tests in other files."""

    class Kit:
        pass

    for part in (WatchedEngine, Stack, Alive, train, equal, BoundaryOffload, FakeEngine):
        setattr(Kit, part.__name__, staticmethod(part) if part in (train, equal) else part)
    Kit.ids = torch.arange(21).reshape(3, 7) % 11
    Kit.nbytes = Kit.ids.numel() * WIDTH * 4
    return Kit


@pytest.fixture(params=[False, True], ids=["non-reentrant", "reentrant"])
def reentrant(request):
    return request.param
