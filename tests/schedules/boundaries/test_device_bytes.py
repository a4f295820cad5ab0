"""How many boundaries are on the device, what host memory they take, and that copies back begin ahead."""

import pytest
import torch


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layers", [3, 6, 16])
def test_boundaries_on_the_device(kit, reentrant, depth, layers):
    """At every call of the engine, and whenever a layer's output has come to be, which counts too."""
    most = []
    for seed in range(8):
        engine = kit.WatchedEngine(seed, eager=(0, 0.3, 0.8)[seed % 3])
        with kit.BoundaryOffload(engine, depth=depth) as offload:
            stack = kit.Stack(layers, reentrant=reentrant, offload=offload)
            for step in range(3):
                alive = kit.Alive(engine, kit.nbytes)
                stack.births = alive.born
                torch.manual_seed(7)
                stack(kit.ids).backward()
                # Which one is the last is known from the second forward on.
                assert alive.most <= min(layers, depth + 1 + (step == 0)), f"seed {seed}, step {step}"
                assert alive.now() == 0
                most.append(alive.most)
    assert max(most) == min(layers, depth + 2)  # the bound is sharp


def test_depth_plus_one_from_the_first_step_where_the_count_is_told(kit, reentrant):
    engine = kit.WatchedEngine(eager=0)
    with kit.BoundaryOffload(engine) as offload:
        stack = kit.Stack(6, reentrant=reentrant, offload=offload)
        begin, offload.begin = offload.begin, lambda: begin(count=6)
        alive = kit.Alive(engine, kit.nbytes)
        stack.births = alive.born
        stack(kit.ids).backward()
        assert alive.most == 2


@pytest.mark.parametrize("count", [2, 5, 9])
def test_a_wrong_count_does_no_harm(kit, reentrant, count):
    want = kit.train(kit.Stack(5, reentrant=reentrant), kit.ids)
    engine = kit.WatchedEngine(eager=0)
    with kit.BoundaryOffload(engine) as offload:
        stack = kit.Stack(5, reentrant=reentrant, offload=offload)
        begin, offload.begin = offload.begin, lambda: begin(count=count)
        alive = kit.Alive(engine, kit.nbytes)
        stack.births = alive.born
        assert kit.equal(kit.train(stack, kit.ids), want)
        assert alive.most <= 3 and offload.offloaded == (5 if count == 9 else 4)
        assert offload.sent["up"] == 4 * kit.nbytes or count == 2
    assert engine.host_bytes == 0


def test_without_offload_all_are_there(kit):
    """The count can fail."""
    engine = kit.WatchedEngine()
    stack = kit.Stack(6)
    alive = kit.Alive(engine, kit.nbytes)
    stack.births = alive.born
    stack(kit.ids).backward()
    assert alive.most == 6


def test_host_memory_is_the_payload_and_is_used_again(kit, reentrant):
    engine = kit.FakeEngine()
    with kit.BoundaryOffload(engine) as offload:
        stack = kit.Stack(9, reentrant=reentrant, offload=offload)
        for _ in range(4):
            loss = stack(kit.ids)
            loss.backward()  # `loss` lives on into the next step, as in most training loops
        assert engine.peak_host_bytes == offload.host_bytes == 8 * kit.nbytes
        # The first step did not know which is the last: the one before that was still there when backward began.
        assert offload.sent == {"down": 4 * 8 * kit.nbytes, "up": (4 * 8 - 1) * kit.nbytes}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_copies_back_begin_before_the_layer_in_front_is_replayed(kit, reentrant, depth):
    """The boundary of layer l is asked for while that of l + depth is handed out, and not before."""
    layers = 7
    engine = kit.WatchedEngine()
    with kit.BoundaryOffload(engine, depth=depth) as offload:
        stack = kit.Stack(layers, reentrant=reentrant, offload=offload)
        stack(kit.ids).backward()
        engine.log.clear()
        engine._count.clear()
        replays = []

        def replayed(module, args):
            if torch._C._current_graph_task_id() != -1:
                replays.append(len(engine.log))

        for layer in stack.layers:
            layer.register_forward_pre_hook(replayed)
        stack(kit.ids).backward()
    begun = {name: at for at, name in enumerate(engine.log) if name.startswith("up")}
    still = depth - 1  # of those that went down, not gone from the device when backward begins
    assert len(replays) == layers and len(begun) == layers - 1 - still
    for number in range(len(begun)):  # copy up `number` is of the boundary that is replayed as number + 1 + still
        ahead = number + 1 + still - depth
        assert begun[f"up {number}"] < replays[ahead]
        assert not ahead or begun[f"up {number}"] >= replays[ahead - 1]


def test_a_copy_down_begins_before_its_layer_and_is_waited_for_after(kit, reentrant):
    engine = kit.WatchedEngine(eager=0)
    with kit.BoundaryOffload(engine) as offload:
        stack = kit.Stack(4, reentrant=reentrant, offload=offload)
        offload.begin(count=4)
        offload.begin, stack.births = (lambda: None), lambda tensor: engine.log.append("born")
        stack(kit.ids)
    assert engine.log[:8] == ["born", "down 0", "born", "compute waits down 0", "down 1", "born"] + [
        "compute waits down 1",
        "down 2",
    ]


def test_copies_come_after_those_of_the_same_memory(kit):
    """On the device's own clock: a fake that never says of a copy that it has ended."""

    class Slow(kit.FakeEngine):
        def __init__(self):
            super().__init__()
            self.users, self.before = {}, []

        def done(self, job):
            return False

        def _copy(self, stream, destination, source, after):
            host = (destination if stream == "down" else source).data_ptr()
            users = self.users.setdefault(host, [])
            self.before.append((stream, [job in after for job in users]))
            users.append(super()._copy(stream, destination, source, after))
            return users[-1]

    engine = Slow()
    with kit.BoundaryOffload(engine) as offload:
        stack = kit.Stack(4, offload=offload)
        for _ in range(3):
            stack(kit.ids).backward()
    assert {stream for stream, _ in engine.before} == {"down", "up"}
    for stream, before in engine.before:
        assert before[-1] if stream == "up" else all(before[-2:])
