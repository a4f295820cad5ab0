"""Checkpointing replays a layer: the routing is the first pass's, and no expert runs more often than it must."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longmoe import patch_model, unpatch_model
from hf_longmoe.integrations.transformers import checkpoint_function
from hf_longmoe.integrations.transformers.regions import watch
from hf_longmoe.peaks import StorageProbe
from hf_longmoe.schedules import replay as core

MODES = ["non-reentrant", "reentrant"]
TOKENS = 38


def checkpoint(model, mode):
    if mode != "plain":
        model.activation_checkpointing_enable({"use_reentrant": mode == "reentrant"})


# -- pinned routing --------------------------------------------------------------------------------------------------
class NearTies:
    """While `flipping`, every `topk` takes the runner-up for its last choice, as rounding may at a near-tie."""

    def __init__(self):
        self.flipping, self.asked, self.stock = False, 0, torch.topk

    def __call__(self, scores, k, *args, **kwargs):
        if k >= scores.shape[-1]:
            return self.stock(scores, k, *args, **kwargs)
        seen = scores.detach()
        if self.flipping:
            self.asked += 1
            last, runner_up = seen.argsort(-1, descending=True)[..., k - 1 : k + 1].split(1, dim=-1)
            swapped = seen.scatter(-1, last, seen.gather(-1, runner_up))
            seen = swapped.scatter(-1, runner_up, seen.gather(-1, last))
        indices = self.stock(seen, k, *args, **kwargs)[1]
        return torch.return_types.topk((scores.gather(-1, indices), indices))


@pytest.fixture
def ties(monkeypatch):
    ties = NearTies()
    monkeypatch.setattr(torch, "topk", ties)
    monkeypatch.setattr(torch.Tensor, "topk", lambda *args, **kwargs: ties(*args, **kwargs))
    return ties


def step(model, batch, gradients, ties):
    """One step whose backward, and with it every replay, decides ties the other way."""
    loss = model(**batch).loss
    ties.flipping = True
    try:
        return gradients(model, loss)
    finally:
        ties.flipping = False


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "qwen2_moe"])
@pytest.mark.parametrize("mode", MODES)
def test_a_flip_of_near_ties_in_the_replay_changes_nothing(
    build, tiny, batch, gradients, assert_same, ties, family, mode
):
    model = patch_model(build(family), tiny)
    want = gradients(model, model(**batch).loss)
    checkpoint(model, mode)
    assert_same(step(model, batch, gradients, ties), want)
    assert ties.asked >= 2  # and it was tried


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_is", ["stock", "patched, not pinned"])
def test_without_the_replay_it_changes_gradients(
    build, tiny, batch, gradients, monkeypatch, ties, family, mode, model_is
):
    """That is, the tests above can fail."""
    if model_is != "stock":
        monkeypatch.setattr(checkpoint_function, "checkpoint_once", lambda region, *kept: region)
    model = build(family)
    if model_is != "stock":
        patch_model(model, tiny)
    want = gradients(model, model(**batch).loss)
    checkpoint(model, mode)
    try:
        got = step(model, batch, gradients, ties)
    except (
        torch.utils.checkpoint.CheckpointError
    ):  # the stock replay may even differ in shape, and so in what it saves
        assert model_is == "stock" and ties.asked
        return
    name = "model.layers.1.mlp.experts.down_proj"
    assert ties.asked and (got[name] - want[name]).abs().max() > 1e-2 * want[name].abs().max()


@pytest.mark.parametrize("mode", MODES)
def test_a_balancing_bias_that_moves_between_forward_and_replay(build, tiny, batch, gradients, assert_same, mode):
    """DeepSeek's bias only chooses: it is updated out of the gradient's sight, and may be while a graph is alive."""
    model = patch_model(build("deepseek_v3"), tiny)
    want = gradients(model, model(**batch).loss)
    checkpoint(model, mode)
    loss = model(**batch).loss
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias += torch.linspace(-2, 2, 6)
    changed = model(**batch).loss
    assert abs(changed - loss) > 1e-3  # by now tokens go elsewhere
    assert_same(gradients(model, loss), want)


@pytest.mark.parametrize("mode", MODES)
def test_noise_on_the_router_in_the_replay(build, tiny, batch, gradients, assert_same, mode):
    """Rounding differences of the hidden states: gradients move by as much, and do not jump to other experts."""
    model = patch_model(build("mixtral"), tiny)
    with torch.no_grad():
        for layer in model.model.layers:  # three pairs of twins: every token's second choice is a near-tie
            layer.mlp.gate.weight[1::2] = layer.mlp.gate.weight[::2]
    want = gradients(model, model(**batch).loss)
    checkpoint(model, mode)
    sign = 1.0

    def noise(router, args):
        tilt = torch.linspace(-1, 1, 32, dtype=torch.float64)
        return (args[0] * (1 + sign * 1e-6 * tilt),)

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_pre_hook(noise)
    loss = model(**batch).loss
    sign = -1.0
    assert_same(gradients(model, loss), want, tolerance=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_two_calls_of_a_layer_keep_their_own_routing(build, tiny, batch, gradients, assert_same, ties, mode):
    """Gradient accumulation with both graphs alive: each replay reads what its own call chose."""
    model = patch_model(build("mixtral"), tiny)
    other = {k: v.flip(0) if k == "attention_mask" else (v + 7) % 101 for k, v in batch.items()}
    want = gradients(model, model(**batch).loss + model(**other).loss)
    checkpoint(model, mode)
    first, second = model(**batch).loss, model(**other).loss
    assert_same(gradients(model, first + second), want)
    assert_same(step(model, batch, gradients, ties), gradients(model, model(**batch).loss))


def test_a_router_that_stands_in_the_layer_itself(tiny, batch, gradients, assert_same, ties):
    """Gemma 4 has no MoE block: router and experts are the layer's own children."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(head_dim=8, global_head_dim=8, intermediate_size=12, hidden_size_per_layer_input=0, use_cache=False)
    moe = dict(enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=12)
    config = AutoConfig.for_model("gemma4_text", **sizes, **moe)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, experts_implementation="eager").train()
    patch_model(model, tiny)
    want = gradients(model, model(**batch).loss)
    checkpoint(model, "non-reentrant")
    assert_same(step(model, batch, gradients, ties), want)
    assert ties.asked >= 2


# -- what pinning keeps ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
def test_only_the_routers_choice_is_kept_and_it_counts_as_a_boundary(build, tiny, batch, mode):
    """A sparse attention's top-k, which is as long as its sequence, is computed again."""
    model = patch_model(build("mixtral"), tiny)
    indexed = []

    def index(attention, args, kwargs):
        indexed.append(kwargs["hidden_states"].topk(16, dim=-1)[1].shape)

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(index, with_kwargs=True)
    checkpoint(model, mode)
    with StorageProbe() as probe, watch(model):
        model(**batch).loss.backward()
    assert len(indexed) == 2 * 3  # passes, layers
    # Of each layer hidden states in float64 and two choices a token in int32.
    assert probe.report().components["boundaries"].peak == 3 * TOKENS * (32 * 8 + 2 * 4)


def test_unpatching_takes_the_hooks_off_again(build):
    model = build("mixtral")
    patch_model(model)
    blocks = [layer.mlp for layer in model.model.layers]
    assert all(block._forward_hooks and block._forward_pre_hooks for block in blocks)
    unpatch_model(model)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks)


# -- how often experts run -------------------------------------------------------------------------------------------
class Products(TorchDispatchMode):
    """Rows that went through a matrix product with the transpose of a weight `[outer, inner]`: a forward one."""

    def __init__(self, inner, outer):
        super().__init__()
        self.shape, self.rows = (inner, outer), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            *_, left, right = args
            if tuple(right.shape) == self.shape and right.stride() == (1, self.shape[0]):
                self.rows += left.shape[0]
        return func(*args, **(kwargs or {}))


def products(model, batch, inner, outer):
    with Products(inner, outer) as counted:
        model(**batch).loss.backward()
    return counted.rows


@pytest.mark.parametrize("mode", ["plain", *MODES])
def test_mixtral_runs_each_expert_twice_a_step(build, tiny, batch, mode):
    """Once in forward, once inside the wave-wise backward: the replay of the layer does not run it again."""
    model = patch_model(build("mixtral"), tiny)
    checkpoint(model, mode)
    assert products(model, batch, 32, 24) == 2 * 3 * TOKENS * 2  # passes, layers, tokens, slots: hidden to gate and up


@pytest.mark.parametrize("mode", ["plain", *MODES])
def test_deepseek_v3_runs_each_expert_and_shared_expert_twice_a_step(build, tiny, batch, mode):
    model = patch_model(build("deepseek_v3", moe_intermediate_size=11, intermediate_size=21), tiny)
    checkpoint(model, mode)
    assert products(model, batch, 32, 22) == 2 * 2 * TOKENS * 2  # passes, MoE layers, tokens, slots
    assert products(model, batch, 32, 11) == 2 * 2 * TOKENS * 2  # passes, MoE layers, tokens, gate and up
    assert products(model, batch, 32, 21) == 2 * 1 * TOKENS * 2  # the dense layer


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("mode", MODES)
def test_without_knowing_the_replay_it_would_be_three(build, tiny, batch, monkeypatch, family, mode):
    """That is, the counts above can fail. (Mixtral's non-reentrant replay ends before it reaches the experts.)"""
    monkeypatch.setattr("hf_longmoe.schedules.nodes.replaying", lambda: False)
    model = patch_model(build(family, moe_intermediate_size=11, intermediate_size=12), tiny)
    checkpoint(model, mode)
    layers, width = (3, 24) if family == "mixtral" else (2, 22)
    runs = 2 if (family, mode) == ("mixtral", "non-reentrant") else 3
    assert products(model, batch, 32, width) == runs * layers * TOKENS * 2


def test_nothing_is_left_of_a_step(build, tiny, batch):
    """The pass is closed also where a layer raises, so that the next step is a first pass again."""
    model = patch_model(build("mixtral"), tiny)
    checkpoint(model, "non-reentrant")
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        model(**batch)
    handle.remove()
    assert core._current.get() is None and not core.replaying()
    model(**batch).loss.backward()
    assert core._current.get() is None and not core.replaying()
