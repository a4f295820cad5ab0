"""`watch` on a small Mixtral: against the profiler, against counts by hand, fake against real."""

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch._C._profiler import _EventType
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig, patch_model
from hf_longmoe.integrations.transformers.regions import watch
from hf_longmoe.peaks import StorageProbe
from hf_longmoe.peaks.allocator import AllocatorProbe

H, I, V, E, K, L, S = 64, 128, 1000, 4, 2, 3, 256  # noqa: E741
FLOAT = 4
CHECKPOINTING = {"off": None, "non-reentrant": False, "reentrant": True}


def mixtral(checkpointing="off", dtype=torch.float32, **options):
    options = {"num_hidden_layers": L} | options
    config = AutoConfig.for_model(
        "mixtral",
        hidden_size=H,
        intermediate_size=I,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=E,
        num_experts_per_tok=K,
        vocab_size=V,
        use_cache=False,
        **options,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    model.set_experts_implementation("grouped_mm")
    if CHECKPOINTING[checkpointing] is not None:
        options = {"use_reentrant": CHECKPOINTING[checkpointing]}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def step(model, optimizer, ids):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(model, optimizer, ids, probe=None):
    probe = StorageProbe() if probe is None else probe
    with probe, watch(model, optimizer):
        step(model, optimizer, ids)
    report = probe.report()
    assert sum(part.at_peak for part in report.components.values()) == report.total
    return report


def profiled_peak(function):
    """The most bytes alive at once above those at the start, from the profiler's allocation events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        function()
    events, todo = [], list(run.profiler.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    level = peak = 0
    for _, nbytes in sorted(events):
        level += nbytes
        peak = max(peak, level)
    return peak


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("router_loss", [False, True])
def test_the_total_is_the_profilers_within_one_percent(checkpointing, router_loss):
    model, optimizer = mixtral(checkpointing, output_router_logits=router_loss)
    ids = torch.randint(0, V, (1, S))
    step(model, optimizer, ids)
    profiled = profiled_peak(lambda: step(model, optimizer, ids))
    report = measure(model, optimizer, ids)
    assert report.total - report.phases["resident"] == pytest.approx(profiled, rel=0.01)


def test_each_component_by_hand_when_every_layer_is_checkpointed():
    model, optimizer = mixtral("non-reentrant", output_router_logits=True)
    ids = torch.randint(0, V, (1, S))
    step(model, optimizer, ids)
    parts = measure(model, optimizer, ids).components

    parameters = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    gradients = sum(p.nbytes for p in model.parameters())
    moments = 2 * gradients + sum(FLOAT for _ in model.parameters())  # and each parameter's step count
    assert parts["parameters"].peak == parts["parameters"].phases["resident"] == parameters
    assert parts["gradients"].peak == gradients and parts["gradients"].phases["forward"] == 0
    assert parts["boundaries"].peak == L * S * H * FLOAT
    assert parts["optimizer"].phases["backward"] == moments
    # One parameter at a time: the root of the second moment and the denominator, beside the previous denominator.
    sizes = [p.nbytes for p in model.parameters()]
    staging = max(2 * size + previous for previous, size in itertools.pairwise([0, *sizes]))
    assert parts["optimizer"].phases["update"] == parts["optimizer"].peak == moments + staging
    # Forward: logits and their log-softmax, padded labels, the loss and what it is divided by. Backward: the gradient
    # of the one and then of the other, beside the log-softmax, and the loss.
    logits = S * V * FLOAT
    assert parts["vocab"].phases["forward"] == 2 * logits + 8 * (S + 1) + 2 * FLOAT
    assert parts["vocab"].phases["backward"] == 3 * logits + FLOAT
    # Each layer's router logits and, kept for backward, their softmax; for one layer at a time what is made of it.
    router_logits = S * E * FLOAT
    assert 2 * L * router_logits < parts["aux"].peak < (2 * L + 4) * router_logits
    assert parts["other"].peak == ids.nbytes + FLOAT  # the batch, and the gradient that starts backward
    # Rows in order, gate and up, their product: at least the first two, at most these, their like in backward, and
    # the weight gradients' padding.
    rows = S * K
    assert rows * (H + 2 * I) * FLOAT < parts["dispatch"].peak < 3 * rows * (H + 3 * I) * FLOAT


class Experts(nn.Module):
    """Stands for an experts module (the class attribute is what `use_experts_implementation` leaves)."""

    def _apply_gate(self, x):
        return x

    def __init__(self):
        super().__init__()
        self.is_concatenated = True
        self.up, self.down = nn.Parameter(torch.randn(H, I)), nn.Parameter(torch.randn(I, H))

    def forward(self, x, index):
        return (x @ self.up) @ self.down


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_dispatch_by_hand_on_a_module_of_known_sizes(checkpointing):
    model, optimizer = mixtral(checkpointing)
    for layer in model.model.layers:
        layer.mlp = Block()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.randint(0, V, (1, S))
    step(model, optimizer, ids)
    part = measure(model, optimizer, ids).components["dispatch"]
    wide, narrow, index = S * I * FLOAT, S * H * FLOAT, S * K * 8
    # [S, I] is kept for backward and the output is not, by any layer; the index lives as long as the call.
    kept = L if checkpointing == "off" else 1
    assert part.phases["forward"] == kept * wide + narrow + index
    if checkpointing == "non-reentrant":  # stops at the last tensor that is saved, which is the second product's input
        assert part.phases["recompute"] == wide + index
    elif checkpointing == "reentrant":
        assert part.phases["recompute"] == wide + narrow + index
    # Its gradient beside what is kept; by the time of the input's gradient this layer's own is gone.
    assert part.phases["backward"] == (kept + 1) * wide


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts()

    def forward(self, x):
        return self.experts(x, torch.zeros(S, K, dtype=torch.long))


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_a_fake_step_equals_a_real_one_byte_for_byte(checkpointing, attention_without_mask):
    reports = {}
    for mode in ("real", "fake"):
        with FakeTensorMode() if mode == "fake" else contextlib.nullcontext():
            model, optimizer = mixtral(checkpointing, dtype=torch.bfloat16, num_hidden_layers=1)
            model.set_attn_implementation(attention_without_mask)
            reports[mode] = measure(model, optimizer, torch.zeros(1, S, dtype=torch.long))
    assert reports["fake"] == reports["real"]


@pytest.fixture
def attention_without_mask():
    """Under fake tensors Transformers forms an S x S mask, which a real causal step does not."""

    def attention(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, None, **{**kwargs, "is_causal": True})

    AttentionInterface.register("test_causal", attention)
    AttentionMaskInterface.register("test_causal", lambda *args, **kwargs: None)
    yield "test_causal"
    del AttentionInterface._global_mapping["test_causal"]
    del AttentionMaskInterface._global_mapping["test_causal"]


def test_accumulated_gradients_are_no_components_own():
    model, optimizer = mixtral("non-reentrant")
    ids = torch.randint(0, V, (1, S))
    step(model, optimizer, ids)
    with StorageProbe() as once, watch(model, optimizer):
        model(input_ids=ids, labels=ids).loss.backward()
    with StorageProbe() as again, watch(model, optimizer):
        model(input_ids=ids, labels=ids).loss.backward()
    once, again = once.report().components, again.report().components
    for name in ("dispatch", "vocab", "layer"):
        assert again[name].peak == once[name].peak
    gradients = sum(p.nbytes for p in model.parameters())
    assert again["gradients"].phases["resident"] == gradients
    assert gradients < again["gradients"].peak < 2 * gradients


def test_removing_the_watch_puts_everything_back():
    model, optimizer = mixtral("non-reentrant")
    modules = list(model.modules())

    def state():
        hooks = [dict(vars(m)) | {k: dict(v) for k, v in vars(m).items() if isinstance(v, dict)} for m in modules]
        for held in hooks:
            held.pop("_parameters"), held.pop("_buffers")
        steps = (dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks))
        grads = [
            (p._backward_hooks and dict(p._backward_hooks), p._post_accumulate_grad_hooks) for p in model.parameters()
        ]
        return hooks, steps, [(a or None, dict(b) if b else None) for a, b in grads]

    before = state()
    with watch(model, optimizer):
        assert state() != before
    assert state() == before and "_loss_function" not in vars(model)

    def own_loss(*args, **kwargs):
        raise RuntimeError("stop")

    model.loss_function = own_loss
    ids = torch.zeros(1, 4, dtype=torch.long)
    with StorageProbe() as probe, watch(model, optimizer), pytest.raises(RuntimeError, match="stop"):
        model(input_ids=ids, labels=ids)
    assert model.loss_function is own_loss
    with StorageProbe() as probe:
        kept = torch.zeros(3)
    assert probe.report().components["other"].peak == kept.nbytes  # no region was left open


def test_a_loss_set_while_watching_is_kept():
    model, optimizer = mixtral()
    with watch(model, optimizer):
        model.loss_function = print
    assert model.loss_function is print


def test_a_wrapped_model_is_watched_and_one_without_a_model_is_an_error():
    model, optimizer = mixtral()
    ids = torch.zeros(1, 8, dtype=torch.long)
    wrapper = nn.ModuleDict({"module": model})
    with StorageProbe() as probe, watch(wrapper, optimizer):
        step(model, optimizer, ids)
    assert probe.report().components["dispatch"].peak > 0
    with pytest.raises(ValueError, match="model=Linear holds no Transformers model; give a PreTrainedModel"):
        watch(nn.Linear(2, 2))


def other_family(family, dtype=torch.float32):
    options = dict(hidden_size=H, intermediate_size=I, num_hidden_layers=2, num_attention_heads=4, vocab_size=V)
    options |= dict(num_key_value_heads=4, use_cache=False)
    if family != "llama":
        options |= dict(num_experts_per_tok=K, moe_intermediate_size=I)
        options["num_local_experts" if family in ("granitemoe", "mixtral") else "num_experts"] = E
    if family == "deepseek_v3":
        options.pop("num_experts")
        options |= dict(n_routed_experts=E, n_group=1, topk_group=1, first_k_dense_replace=1)
        options |= dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=8)
    if family == "qwen2_moe":
        options |= dict(shared_expert_intermediate_size=I)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options), dtype=dtype).train()
    return model, torch.optim.SGD(model.parameters())


@pytest.mark.parametrize(
    ("family", "probe"),
    [("mixtral", "storage"), ("mixtral", "allocator"), ("qwen2_moe", "storage"), ("deepseek_v3", "storage")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_working_of_a_patched_model_is_what_its_caps_bound(family, dtype, probe):
    model, optimizer = other_family(family, dtype)
    caps = {"dispatch": 256 << 10, "vocab": 256 << 10}
    patch_model(model, LongMoEConfig(dispatch=DispatchConfig(budget="256KiB"), vocab=VocabConfig(budget="256KiB")))
    ids = torch.randint(0, V, (1, 512))
    with StorageProbe() as storages, watch(model, optimizer) as handle:
        model(ids)
        with AllocatorProbe(CountingMemory(storages), "cpu") if probe == "allocator" else StorageProbe() as counted:
            step(model, optimizer, ids)
    report = counted.report()
    for name, cap in caps.items():
        working = report.components[name].working
        assert cap // 2 < working <= cap + handle.beside_caps[name], (name, working)
    rounded = 512 * H * dtype.itemsize if dtype != torch.float32 else 0
    assert handle.beside_caps["vocab"] == 16 * 512 + rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_of_the_models_own_kernel_are_beside_the_cap(dtype):
    """One expert's are more than a budget of a few rows."""
    model, optimizer = mixtral("non-reentrant", dtype)
    config = DispatchConfig(budget="32KiB", kernel="model")
    patch_model(model, LongMoEConfig(dispatch=config, vocab=None))
    ids = torch.randint(0, V, (1, 512))
    with StorageProbe() as probe, watch(model, optimizer) as handle:
        step(model, optimizer, ids)
    working, rows = probe.report().components["dispatch"].working, 512 * K
    one_expert = 3 * H * I * dtype.itemsize
    wide = 3 * H * I * FLOAT if dtype != torch.float32 else 0
    assert handle.beside_caps["dispatch"] == 24 * rows + wide + one_expert * 5 // 3
    assert config.budget + 24 * rows + wide < working <= config.budget + handle.beside_caps["dispatch"]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "granitemoe", "llama"])
def test_other_families(family):
    model, optimizer = other_family(family)
    ids = torch.randint(0, V, (1, S))
    parts = measure(model, optimizer, ids).components
    assert parts["vocab"].phases["forward"] >= 2 * S * V * FLOAT
    assert (parts["dispatch"].peak > S * K * I * FLOAT) == (family != "llama")
    assert parts["other"].peak == ids.nbytes + FLOAT
    if family == "deepseek_v3":  # the dense MLP of the first layer is dispatch too
        dense = model.model.layers[0].mlp
        sizes = []
        dense.register_forward_hook(lambda m, a, o: sizes.append(o.nbytes))
        with StorageProbe() as probe, watch(model, optimizer):
            with torch.no_grad():
                model.model.layers[0].mlp(torch.zeros(1, S, H))
        assert probe.report().components["dispatch"].peak >= sizes[0]
        assert probe.report().components["layer"].peak == 0


class CountingMemory:
    """An allocator on CPU: the storages that a probe of its own sees."""

    def __init__(self, probe):
        self.ledger = probe._ledger
        self.top = 0

    def read(self):
        self.top = max(self.top, self.ledger.report().total)
        self.ledger.restart()
        return self.ledger.report().total, self.top

    def reset_peak(self):
        self.top, _ = self.read()


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_the_allocator_probe_agrees_with_the_storage_probe(checkpointing):
    model, optimizer = mixtral(checkpointing)
    ids = torch.randint(0, V, (1, S))
    step(model, optimizer, ids)
    exact = measure(model, optimizer, ids)
    with StorageProbe() as storages, watch(model, optimizer):
        model(ids)  # a first forward: the storages that are there are tagged
        counted = measure(model, optimizer, ids, AllocatorProbe(CountingMemory(storages), "cpu"))
    assert counted.total == exact.total
    for name, part in exact.components.items():
        # A gradient or boundary is taken off its maker's peak wherever that was in the run, before its birth too.
        tolerance = 0.1 if name in ("dispatch", "layer") else 0.01
        assert counted.components[name].peak == pytest.approx(part.peak, rel=tolerance, abs=64), name
