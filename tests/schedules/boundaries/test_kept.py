"""What layers keep for their replay (the router's choices) travels with their boundary."""

from dataclasses import dataclass

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_longmoe.schedules.replay import checkpoint_once, recall


@dataclass(frozen=True)
class Part:
    order: torch.Tensor
    first: list
    name: str = "a part"


@dataclass(frozen=True)
class Choice:
    parts: list
    whole: Part
    pair: tuple


def _choose():
    whole = Part(torch.randperm(8, dtype=torch.int32), [0, 3])
    return Choice([whole, Part(torch.randperm(5), [1])], whole, (torch.rand(3), None, 2))


def _same(a, b):
    return (
        all(torch.equal(p.order, q.order) and p.first == q.first for p, q in zip(a.parts, b.parts, strict=True))
        and torch.equal(a.pair[0], b.pair[0])
        and a.pair[1:] == b.pair[1:]
    )


def test_values_come_back_in_every_replay():
    stored = []

    def store(tensor):
        kept = tensor.clone()
        stored.append(tensor)
        return lambda: kept.clone()

    region = checkpoint_once(lambda: recall(_choose), store=store)
    first = region()
    assert len(stored) == 3  # what is there twice, once
    for _ in range(2):
        again = region()
        assert _same(first, again) and again is not first and again.parts[0].order is not first.parts[0].order
        assert again.whole is again.parts[0] and type(again) is Choice and again.whole.name == "a part"
        assert again.parts[0].first is first.parts[0].first  # what has no tensor is not copied


def test_the_first_pass_uses_its_own_value():
    made = []

    def choose():
        made.append(torch.rand(3))
        return made[-1]

    region = checkpoint_once(lambda: recall(choose), store=lambda tensor: lambda: torch.zeros(3))
    assert region() is made[0] and torch.equal(region(), torch.zeros(3)) and len(made) == 1


def test_what_is_shared_is_not_stored():
    mask = torch.ones(3)
    region = checkpoint_once(lambda: recall(lambda: (True, mask), shared=True), store=lambda tensor: 1 / 0)
    assert region()[1] is mask and region()[1] is mask


def test_without_a_store_the_value_itself_is_kept():
    region = checkpoint_once(lambda: recall(_choose))
    assert region() is region()


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_go_to_host_memory_and_are_prefetched(kit, reentrant, depth):
    """Each layer's choices leave the device with its boundary, and are back before its replay."""
    layers, size = 6, 1000
    want = None
    for seed in range(6):
        engine = kit.WatchedEngine(seed, eager=(0, 0.3, 0.8)[seed % 3])
        with kit.BoundaryOffload(engine, depth=depth) as offload:
            for step in range(3):
                alive = kit.Alive(engine, size * 4)
                inside, wrong = [], []

                def layer(x, alive=alive, wrong=wrong):
                    def choose():
                        chosen = torch.randperm(size, dtype=torch.int32)
                        alive.born(chosen)
                        return chosen

                    chosen = recall(choose)
                    wrong.extend([] if torch.equal(chosen.sort()[0], torch.arange(size)) else [chosen])
                    return x * chosen.double().reshape(-1, 10).sum(0).sin()

                offload.begin()
                torch.manual_seed(1)
                start = x = torch.ones(10, dtype=torch.float64, requires_grad=True)
                for _ in range(layers):
                    run = checkpoint_once(layer, store=offload.store)
                    x = offload.checkpoint(checkpoint, run, x, use_reentrant=reentrant)
                inside.append(alive.now())
                x.sum().backward()
                want = start.grad if want is None else want
                assert torch.equal(start.grad, want) and not wrong
                # `size` tells them from the boundaries, which are a fiftieth of it; the last stays, like its boundary.
                assert inside[0] <= depth + (step == 0) + 0.5
                assert alive.most <= depth + 1 + (step == 0) + 0.5
                assert offload.host_bytes >= (layers - 1) * size * 4
                del x, run
                assert alive.now() == 0
        assert engine.host_bytes == engine.waiting() == 0


def test_outside_of_a_checkpoint_it_gives_back_what_it_got(kit):
    tensor = torch.arange(3)
    assert kit.BoundaryOffload(kit.FakeEngine()).store(tensor)() is tensor
    assert kit.BoundaryOffload(None).store(tensor)() is tensor
