"""The storage probe against counts made by hand. Every size below is float32, so 4 bytes an element."""

import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from hf_longmoe.peaks import StorageProbe, component
from hf_longmoe.peaks.region import tag

T, H, I = 32, 16, 64  # noqa: E741
ROWS, WIDE = T * H * 4, T * I * 4  # bytes of [T, H] and of [T, I]
WEIGHT = H * I * 4


class Block(nn.Module):
    """y = relu(x w1) w2, in a region. Keeps x and relu's result for backward."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(H, I)), nn.Parameter(torch.randn(I, H))

    def forward(self, x):
        with component("dispatch"):
            return torch.relu(x @ self.w1) @ self.w2


def peaks(probe):
    report = probe.report()
    assert sum(part.at_peak for part in report.components.values()) == report.total
    assert all(part.peak == max(part.phases.values()) for part in report.components.values())
    return {name: part for name, part in report.components.items() if part.peak}


def test_forward_and_backward_by_hand():
    block, x = Block(), torch.randn(T, H, requires_grad=True)
    with StorageProbe() as probe:
        tag("parameters", list(block.parameters()))
        tag("boundaries", x)
        with component("layer"):
            y = block(x)
            loss = y.sum()
        loss.backward()
        tag("gradients", [block.w1.grad, block.w2.grad, x.grad])
    by_name = peaks(probe)
    # x w1, then relu(x w1) beside it, then x w1 dies and y comes.
    assert by_name["dispatch"].phases["forward"] == 2 * WIDE
    # Kept: relu's result, y. Backward of the second product makes [T, I], then relu's makes another beside it.
    assert by_name["dispatch"].phases["backward"] == 3 * WIDE + ROWS
    assert by_name["parameters"].peak == 2 * WEIGHT
    assert by_name["boundaries"].peak == ROWS
    assert by_name["gradients"].peak == 2 * WEIGHT + ROWS
    # The loss, and in backward the gradient that starts it; the sum's backward only makes a view of that.
    assert by_name["layer"].phases["forward"] == 4
    assert set(by_name) == {"dispatch", "parameters", "boundaries", "gradients", "layer", "other"}
    assert by_name["other"].peak == 4


def test_a_storage_belongs_to_its_last_owner_from_its_birth():
    with StorageProbe() as probe:
        with component("layer"):
            boundary = torch.zeros(100)
            passing = torch.zeros(10)
        tag("boundaries", {"any": [boundary]})
        del passing
    by_name = peaks(probe)
    assert by_name["layer"].peak == 40
    assert by_name["boundaries"].peak == 400


def test_what_a_tag_finds_counts_as_resident():
    before = torch.zeros(50)
    with StorageProbe() as probe:
        kept = torch.zeros(5)
        tag("parameters", before, [None, "no tensor"])
        tag("parameters", before.view(5, 10))
    report = probe.report()
    assert report.phases == {"resident": before.nbytes, "forward": before.nbytes + kept.nbytes}
    assert report.components["parameters"].phases == {"resident": 200, "forward": 200}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_is_recognised_and_belongs_to_the_regions_it_enters(use_reentrant):
    block, x = Block(), torch.randn(T, H, requires_grad=True)

    def layer(x):
        with component("layer"):
            return block(x.exp()).exp()

    with StorageProbe() as probe:
        y = checkpoint(layer, x, use_reentrant=use_reentrant, preserve_rng_state=False)
        with component("vocab"):
            loss = y.square().mean()
        loss.backward()
    by_name = peaks(probe)
    # Under checkpointing neither relu's argument nor its result outlives the forward; both are there at once.
    assert by_name["dispatch"].phases["forward"] == by_name["dispatch"].phases["recompute"] == 2 * WIDE
    # relu's result, the gradients of it and of relu's argument, and that of w2.
    assert by_name["dispatch"].phases["backward"] == 3 * WIDE + WEIGHT
    # y; then again x.exp(), kept for the first product, and y; then y's gradient.
    assert by_name["layer"].phases["forward"] == ROWS
    assert by_name["layer"].phases["recompute"] == 3 * ROWS
    assert by_name["layer"].phases["backward"] == 4 * ROWS
    assert by_name["vocab"].phases["backward"] == 4 * ROWS + 4
    assert by_name["other"].peak == 4  # the gradient that starts it


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_outside_of_any_region_belongs_to_the_one_that_asked_for_it(use_reentrant):
    x = torch.randn(T, H, requires_grad=True)
    with StorageProbe() as probe:
        with component("aux"):
            y = checkpoint(lambda x: x.exp().exp(), x, use_reentrant=use_reentrant, preserve_rng_state=False)
        with component("vocab"):
            loss = y.sum()
        loss.backward()
    by_name = peaks(probe)
    assert by_name["aux"].phases["recompute"] == 3 * ROWS  # the output, and both results again
    assert by_name["aux"].phases["backward"] >= 4 * ROWS  # the gradient of the first result
    assert by_name["vocab"].peak == by_name["other"].peak == 4


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_an_autograd_function_does_in_a_recompute_is_recompute(use_reentrant):
    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (x.exp() + 1).log()  # two results at a time

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0]

    def layer(x):
        with component("dispatch"):
            return Exponential.apply(x).sin()

    x = torch.randn(T, H, requires_grad=True)
    with StorageProbe() as probe:
        y = checkpoint(layer, x, use_reentrant=use_reentrant, preserve_rng_state=False)
        with component("vocab"):
            loss = y.sum()
        loss.backward()
    phases = peaks(probe)["dispatch"].phases
    assert phases["forward"] == 2 * ROWS
    assert phases["recompute"] == 3 * ROWS  # and the output, the loss's own


def test_a_hand_written_backward_that_recomputes_belongs_to_its_region():
    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = x.exp()
            return torch.autograd.grad(y, x, gradient)[0]

    x = torch.randn(T, H, requires_grad=True)
    with StorageProbe() as probe:
        with component("dispatch"):
            y = Exponential.apply(x)
        with component("vocab"):
            loss = (y * 2).sum()
        loss.backward()
    by_name = peaks(probe)
    assert by_name["dispatch"].phases["forward"] == ROWS
    assert by_name["dispatch"].phases["recompute"] == 2 * ROWS  # y of the first run and of the second
    assert by_name["dispatch"].phases["backward"] == 3 * ROWS  # and the gradient


def test_a_region_open_around_backward_takes_all_of_it():
    block, x = Block(), torch.randn(T, H)
    with StorageProbe() as probe:
        loss = block(x).sum()
        with component("aux"):
            loss.backward()
    assert peaks(probe)["aux"].peak >= 2 * WIDE


def test_working_leaves_out_inputs_outputs_and_what_is_kept():
    with StorageProbe() as probe:
        with component("dispatch"):
            kept = torch.zeros(1000)
        outputs = []
        for _ in range(3):
            with component("vocab"):
                scratch = torch.zeros(70)
                outputs.append(torch.zeros(30))
                scratch = torch.zeros(7)
                del scratch
        with component("dispatch"):
            with component("dispatch"):  # a visit of its own
                inner = torch.zeros(20)
                del inner
            del kept
    by_name = peaks(probe)
    assert by_name["vocab"].working == 70 * 4 + 7 * 4
    assert by_name["vocab"].peak == 70 * 4 + 7 * 4 + 3 * 30 * 4
    assert by_name["dispatch"].working == 20 * 4


def test_views_and_in_place_operators_are_no_allocations():
    with StorageProbe() as probe:
        x = torch.zeros(T, H)
        x.view(-1)[3:].add_(1)
        assert x.transpose(0, 1).expand(2, H, T).detach().shape == (2, H, T)
        torch.add(x, 1, out=x)
    assert probe.report().total == ROWS


def test_a_freed_storage_makes_room_even_through_a_reference_cycle():
    with StorageProbe() as probe:
        for _ in range(3):
            loop = [torch.zeros(1000)]
            loop.append(loop)
            del loop
            gc.collect()
    assert probe.report().total == 4000


def test_resizing_a_storage_in_place_is_seen_and_leaves_nothing_behind():
    x = torch.zeros(1000)
    with StorageProbe() as first, StorageProbe() as second:
        tag("parameters", x)
        x.untyped_storage().resize_(0)
        y = torch.zeros(500)
        x.untyped_storage().resize_(8000)
        assert x.untyped_storage().nbytes() == 8000
        y.resize_(600)
    for probe in (first, second):
        assert probe.report().components["parameters"].phases == {"resident": 4000, "forward": 8000}
        assert probe.report().components["other"].peak == 2400
    assert "resize_" not in vars(torch.UntypedStorage)


def test_a_probe_that_an_exception_closes_leaves_nothing_installed():
    with pytest.raises(RuntimeError, match="stop"), StorageProbe() as probe, component("dispatch"):
        raise RuntimeError("stop")
    assert _get_current_dispatch_mode() is None and "resize_" not in vars(torch.UntypedStorage)
    with probe:  # and it can be used again
        with pytest.raises(RuntimeError, match="open already"):
            probe.__enter__()
    assert _get_current_dispatch_mode() is None


def test_each_use_and_each_restart_is_a_new_step():
    probe = StorageProbe()
    with probe:
        kept, passing = torch.zeros(10), torch.zeros(1000)
        del passing
        probe.restart()
        assert probe.report().total == kept.nbytes
        more = torch.zeros(5)
    assert probe.report().total == kept.nbytes + more.nbytes
    del kept, more
    with probe:
        pass
    assert probe.report().total == 0


def test_the_optimizers_step_is_a_phase():
    with StorageProbe() as probe:
        with component("optimizer"):
            kept = torch.zeros(10)
        tag("optimizer", kept)
    assert peaks(probe)["optimizer"].phases["update"] == 40


@pytest.mark.parametrize("device", ["meta", "meta:0"])
def test_one_device_only(device):
    with StorageProbe(device) as probe:
        kept = [torch.zeros(10), torch.zeros(10, device="meta")]
    assert probe.report().total == 40 and len(kept) == 2


def test_fake_accelerator_tensors_are_rounded_as_its_allocator_does():
    with torch._subclasses.FakeTensorMode(), StorageProbe() as probe:
        kept = [torch.empty(1, device="cuda"), torch.empty(129, device="cuda")]
    assert probe.report().total == 512 + 1024 and len(kept) == 2


def test_a_subclass_that_wraps_tensors_is_counted_by_what_it_wraps(one_rank):
    from torch.distributed.tensor import DTensor, Replicate

    local = torch.ones(T, H)
    x = DTensor.from_local(local, one_rank, [Replicate()], run_check=False)
    with StorageProbe() as probe:
        tag("parameters", x)
        with component("dispatch"):
            y = x * 2 + x
    assert isinstance(y, DTensor)
    by_name = peaks(probe)
    assert by_name["parameters"].peak == local.nbytes
    assert by_name["dispatch"].peak == 2 * ROWS


@pytest.fixture
def one_rank(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_higher_order_operator_is_counted_by_what_it_returns():
    x = torch.ones(T, H)
    with StorageProbe() as probe:
        with component("layer"):
            y = torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (x,))
    assert probe.report().components["layer"].peak == y.nbytes + 1
