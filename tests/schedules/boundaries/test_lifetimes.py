"""Graphs that do not go the usual way: nothing leaks, nothing is wrong, and nobody waits for the garbage collector."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

SEEDS = range(6)


@pytest.fixture(autouse=True)
def no_collector():
    """What is only freed by the garbage collector counts as leaked."""
    gc.collect()
    gc.freeze()  # or each collection below would look at all of torch
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def _made(kit, seed, reentrant, depth=1, **stack):
    engine = kit.WatchedEngine(seed, eager=(0, 0.3, 0.8)[seed % 3])
    offload = kit.BoundaryOffload(engine, depth=depth)
    model = kit.Stack(5, reentrant=reentrant, offload=offload, **stack)
    alive = kit.Alive(engine, kit.nbytes)
    model.births = alive.born
    return engine, offload, model, alive


def _nothing_left(engine, offload, alive):
    assert alive.now() == 0 and engine.device_bytes == 0
    offload.close()
    assert engine.host_bytes == offload.host_bytes == engine.waiting() == 0


def _loss(stack, ids, seed):
    torch.manual_seed(seed)
    return stack(ids)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("depth", [1, 2])
def test_several_forwards_before_backward(kit, reentrant, order, depth):
    plain = kit.Stack(5, reentrant=reentrant)
    batches = [kit.ids, kit.ids[:, :5], kit.ids.flip(0)]
    losses = [_loss(plain, ids, at) for at, ids in enumerate(batches)]
    want = []
    for at in order:
        losses[at].backward()
        want.append(plain.gradients())
    for seed in SEEDS:
        engine, offload, stack, alive = _made(kit, seed, reentrant, depth)
        losses = [_loss(stack, ids, at) for at, ids in enumerate(batches)]
        assert alive.most <= depth + 2  # however many forwards there are
        for at, expected in zip(order, want, strict=True):
            losses[at].backward()
            assert kit.equal(stack.gradients(), expected)
        del losses
        _nothing_left(engine, offload, alive)


def test_interleaved_backwards(kit):
    """Two graphs, whose backwards take turns by layers (of one autograd call)."""
    ids = kit.ids, kit.ids.flip(0)
    plain = kit.Stack(5)
    (_loss(plain, ids[0], 1) + _loss(plain, ids[1], 2)).backward()
    want = plain.gradients()
    for seed in SEEDS:
        engine, offload, stack, alive = _made(kit, seed, False)
        loss = _loss(stack, ids[0], 1) + _loss(stack, ids[1], 2)
        loss.backward()
        assert kit.equal(stack.gradients(), want)
        del loss
        _nothing_left(engine, offload, alive)


def test_one_graph_that_two_losses_share(kit):
    """Each of two backwards goes through the lower layers; the second after the first, which keeps the graph."""

    def losses(stack):
        torch.manual_seed(1)
        if stack.offload is not None:
            stack.offload.begin(count=5)
        x = stack.embed(kit.ids)
        for at, layer in enumerate(stack.layers):
            if at == 3:
                first = x.square().sum()
            x = stack.call(layer, x, stack.scale)
        return first, x.square().sum()

    def run(stack):
        first, second = losses(stack)
        first.backward(retain_graph=True)
        second.backward()
        return stack.gradients()

    want = run(kit.Stack(5))
    for seed in SEEDS:
        engine, offload, stack, alive = _made(kit, seed, False)
        assert kit.equal(run(stack), want)
        _nothing_left(engine, offload, alive)


@pytest.mark.parametrize("routed", [False, True])
def test_retain_graph(kit, reentrant, routed):
    want = kit.train(kit.Stack(5, reentrant=reentrant, routed=routed), kit.ids)[1:]
    for seed in SEEDS:
        engine, offload, stack, alive = _made(kit, seed, reentrant, routed=routed)
        loss = _loss(stack, kit.ids, 7)
        for again in (True, True, False):
            loss.backward(retain_graph=again)
            assert kit.equal(stack.gradients(), want)
            assert engine.device_bytes == 0  # what was brought back is not kept for the next time
        del loss
        _nothing_left(engine, offload, alive)


@pytest.mark.parametrize("routed", [False, True])
def test_a_dropped_graph(kit, reentrant, routed):
    for seed in SEEDS:
        engine, offload, stack, alive = _made(kit, seed, reentrant, routed=routed)
        for _ in range(3):
            loss = stack(kit.ids)
            del loss
            assert alive.now() == 0  # at once, not with the next forward
        want = kit.train(kit.Stack(5, reentrant=reentrant, routed=routed), kit.ids)
        assert kit.equal(kit.train(stack, kit.ids), want)
        assert engine.peak_host_bytes == (5 if routed else 4) * kit.nbytes  # choices: 4 of 16 columns
        _nothing_left(engine, offload, alive)


def test_an_exception_in_a_layer(kit, reentrant):
    want = kit.train(kit.Stack(5, reentrant=reentrant), kit.ids)
    for seed in SEEDS:
        for bad in range(5):
            engine, offload, stack, alive = _made(kit, seed, reentrant)

            def fail(module, args):
                raise ArithmeticError("in the layer")

            handle = stack.layers[bad].register_forward_pre_hook(fail)
            with pytest.raises(ArithmeticError):
                stack(kit.ids)
            handle.remove()
            assert alive.now() == 0
            assert kit.equal(kit.train(stack, kit.ids), want)
            _nothing_left(engine, offload, alive)


@pytest.mark.parametrize("routed", [False, True])
def test_an_exception_in_backward(kit, reentrant, routed):
    """In the replay of each layer, when the one before is on its way."""
    want = kit.train(kit.Stack(5, reentrant=reentrant, routed=routed), kit.ids)
    for seed in SEEDS:
        for bad in range(5):
            engine, offload, stack, alive = _made(kit, seed, reentrant, routed=routed)

            def fail(module, args):
                if torch._C._current_graph_task_id() != -1:
                    raise ArithmeticError("in the replay")

            handle = stack.layers[bad].register_forward_pre_hook(fail)
            loss = stack(kit.ids)
            with pytest.raises(ArithmeticError):
                loss.backward()
            handle.remove()
            stack.zero_grad()
            del loss
            gc.collect()  # the failed recompute's exception and frames are a cycle
            assert alive.now() == 0
            assert kit.equal(kit.train(stack, kit.ids), want)
            _nothing_left(engine, offload, alive)


@pytest.mark.parametrize("late", [0, 1, 3, 4, 5, 7])
def test_a_copy_that_fails(kit, reentrant, late):
    want = kit.train(kit.Stack(5, reentrant=reentrant, routed=True), kit.ids)
    for seed in SEEDS:
        engine, offload, stack, alive = _made(kit, seed, reentrant, routed=True)
        kit.train(stack, kit.ids)
        engine.fail_at = late
        with pytest.raises(RuntimeError, match="failed, as asked"):
            stack(kit.ids).backward()
        stack.zero_grad()
        gc.collect()
        assert alive.now() == 0
        assert kit.equal(kit.train(stack, kit.ids), want)
        _nothing_left(engine, offload, alive)


def test_closed_between_forward_and_backward(kit, reentrant):
    want = kit.train(kit.Stack(5, reentrant=reentrant, routed=True), kit.ids)
    for seed in SEEDS:
        engine, offload, stack, alive = _made(kit, seed, reentrant, routed=True)
        loss = _loss(stack, kit.ids, 7)
        offload.close()
        assert engine.host_bytes > 0
        loss.backward()
        assert kit.equal(stack.gradients(), want[1:])
        assert engine.host_bytes == engine.device_bytes == 0  # though `loss` lives


def test_closed_with_a_graph_that_is_dropped(kit, reentrant):
    engine, offload, stack, alive = _made(kit, 0, reentrant, routed=True)
    loss = stack(kit.ids)
    offload.close()
    del loss
    assert engine.host_bytes == engine.waiting() == alive.now() == 0


def test_dropped_without_being_closed(kit, reentrant):
    """As with a model that nobody holds any more: pinned memory must be unpinned before it is freed."""
    engine, offload, stack, alive = _made(kit, 0, reentrant, routed=True)
    kit.train(stack, kit.ids)
    loss = _loss(stack, kit.ids, 7)
    del offload, stack
    gc.collect()  # modules are in cycles of their own
    assert engine.host_bytes > 0, "backward can still be run"
    loss.backward()
    del loss
    gc.collect()
    assert engine.host_bytes == engine.device_bytes == engine.waiting() == 0


def test_a_copy_offloads_nothing(kit):
    engine, offload, stack, alive = _made(kit, 0, False)
    want = kit.train(stack, kit.ids)
    stack.births = id
    for copied in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        sent = engine.sent["down"]
        assert kit.equal(kit.train(copied, kit.ids), want) and engine.sent["down"] == sent > 0


def test_a_prefetch_under_way_is_waited_for_when_its_graph_dies(kit):
    """Only the top layer is differentiated; the boundary below is on its way and nobody will ask for it."""
    engine, offload, stack, alive = _made(kit, 0, False)
    engine._eager = 0
    kit.train(stack, kit.ids)
    loss = stack(kit.ids)
    torch.autograd.grad(loss, stack.layers[4].linear.weight)
    assert engine.waiting() > 0 and engine.device_bytes > 0
    del loss
    assert engine.device_bytes == 0  # an engine that had not been waited for would have said so when its copy ran
    _nothing_left(engine, offload, alive)


def test_garbage_that_is_collected_while_the_lock_is_held(kit):
    """A graph in a cycle dies in the middle of the next forward, at any allocation."""
    for seed in SEEDS:
        engine, offload, stack, alive = _made(kit, seed, False, routed=True)
        want = kit.train(kit.Stack(5, routed=True), kit.ids)
        cycle = [stack(kit.ids)]
        cycle.append(cycle)
        del cycle
        down, fired = engine.down, []

        def collecting(*args, down=down, fired=fired, **kwargs):
            fired.append(gc.collect())
            return down(*args, **kwargs)

        engine.down = collecting
        assert kit.equal(kit.train(stack, kit.ids), want)
        assert fired
        _nothing_left(engine, offload, alive)


def test_a_function_that_is_no_checkpoint(kit):
    """What its operators save comes by: outputs too, which must not hold on to their own nodes."""
    for seed in SEEDS:
        engine = kit.FakeEngine(seed)
        with kit.BoundaryOffload(engine) as offload:
            offload.begin(count=2)
            x = torch.randn(3, 4, requires_grad=True)
            y = offload.checkpoint(lambda region, x: region(x), lambda x: (x * x).exp(), x)
            node = weakref.ref(y.untyped_storage())
            y = offload.checkpoint(lambda region, x: region(x), torch.tanh, y)
            y.sum().backward(retain_graph=True)
            want = torch.autograd.grad((x * x).exp().tanh().sum(), x)[0]
            assert torch.equal(x.grad, want)
            del y
            assert node() is None
        assert engine.host_bytes == engine.device_bytes == engine.waiting() == 0
