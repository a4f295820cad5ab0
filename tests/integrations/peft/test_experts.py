"""LoRA on stacked expert weights: loss and gradients of stock PEFT, for any layout, kernel and set of adapters."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_longmoe import patch_model, unpatch_model
from hf_longmoe.integrations.peft import ExpertAdapters
from hf_longmoe.integrations.transformers.experts import patch_experts
from hf_longmoe.schedules.dispatch import LocalDispatch

CASES = {
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "gpt_oss": ("gpt_oss", {}, {}),  # transposed, with biases, a gate of its own
    "the model's kernel": ("gpt_oss", {}, dict(kernel="model")),
    "the model's kernel, another layout": ("qwen3_moe", {}, dict(kernel="model")),
    "one parameter": ("qwen3_moe", dict(target_parameters=["mlp.experts.down_proj"]), {}),
    "rank-stabilised, a pattern of ranks": (
        "qwen3_moe",
        dict(use_rslora=True, rank_pattern={".*down_proj": 5}, alpha_pattern={".*down_proj": 3}),
        {},
    ),
    "attention and router too": (
        "qwen3_moe",
        dict(
            target_modules=["q_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
        ),
        {},
    ),
    "shared experts too": ("qwen2_moe", dict(target_modules=["shared_expert.up_proj", "down_proj", "gate_proj"]), {}),
}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", CASES)
def test_exact(build, batch, caps, lora, step, assert_same, name, order):
    family, options, dispatch = CASES[name]
    want = step(lora(build(family), **options), batch, stock=True)
    if order == "before":
        model = patch_model(lora(build(family), **options), caps(**dispatch))
    else:
        model = lora(patch_model(build(family), caps(**dispatch)), **options)
    got = step(model, batch)
    assert_same(got, want)
    assert all("lora_" in n for n in got if n != "loss")
    left = [entry for entry in model.longmoe.entries if entry.schedule is None]
    assert not left, left


def test_checkpointing_runs_each_layer_once_more_and_is_exact(build, batch, caps, lora, step, assert_same):
    want = step(lora(build("qwen3_moe")), batch, stock=True)
    for reentrant in (True, False):
        model = patch_model(lora(build("qwen3_moe")), caps())
        model.enable_input_require_grads()
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_same(step(model, batch), want)


class Products(TorchDispatchMode):
    """The shapes that matrix products give."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(name in str(func) for name in ("mm", "bmm", "einsum", "matmul")):
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_frozen_base_gets_no_gradient_work(build, batch, caps, lora, step, family):
    """No product gives anything of an expert's or the head's shape, and nothing as large as all experts."""
    model = lora(build(family))
    frozen = {tuple(p.shape[-2:]) for n, p in model.named_parameters() if "experts" in n and "lora" not in n}
    frozen = {shape for a, b in frozen for shape in ((a, b), (b, a)) if a > 6} | {(101, 32), (32, 101)}

    def whole(shapes):
        return [s for s in shapes if s[-2:] in frozen]

    with Products() as products:
        step(model, batch, stock=True)
    assert whole(products.shapes)  # stock PEFT forms them
    patch_model(model, caps())
    with Products() as products:
        step(model, batch)
    assert products.shapes and not whole(products.shapes)


def test_adapters_are_switched_merged_and_taken_off(build, batch, caps, several, step, assert_same):
    stock, model = several(build("qwen3_moe")), patch_model(several(build("qwen3_moe")), caps())
    inputs = {k: v for k, v in batch.items() if k != "labels"}

    def same():
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, stock(**inputs).logits, rtol=1e-12, atol=1e-12)
        return stock(**inputs).logits

    def both(change):
        change(stock), change(model)
        return same()

    first = same()
    second = both(lambda m: m.set_adapter("other"))
    assert_same(step(model, batch), step(stock, batch, stock=True))
    together = both(lambda m: m.base_model.set_adapter(["default", "other"]))
    assert_same(step(model, batch), step(stock, batch, stock=True))
    with model.disable_adapter(), stock.disable_adapter():
        none = same()
    both(lambda m: m.base_model.set_adapter("default"))
    merged = both(lambda m: m.merge_adapter())
    both(lambda m: m.unmerge_adapter())
    torch.testing.assert_close(merged, first)
    for a, b in ((first, second), (first, together), (first, none), (second, together)):
        assert (a - b).abs().max() > 1e-3
    model, stock = model.merge_and_unload(), stock.merge_and_unload()
    same()
    assert "longmoe" in vars(model) and not any("longmoe_adapters" in vars(m) for m in unpatch_model(model).modules())


def test_unpatching_leaves_no_trace(build, batch, caps, lora, step, assert_same):
    model = lora(build("gpt_oss"))
    want = step(model, batch, stock=True)  # PEFT itself changes the order of parameters in a call
    keys, attributes = [*model.state_dict()], {name: {*vars(m)} for name, m in model.named_modules()}
    for _ in range(2):
        patch_model(model, caps())
        assert [*model.state_dict()] == keys
        step(model, batch)
        unpatch_model(model)
        left = {n: {*vars(m)} - attributes[n] for n, m in model.named_modules()}
        assert not any(any("longmoe" in a or a in ("forward", "_activate_lora") for a in left[n]) for n in left)
    got = step(model, batch, stock=True)
    assert all(torch.equal(got[n], want[n]) for n in want)


def test_a_copy_of_the_model_runs_its_own_adapters(build, batch, caps, lora, step, assert_same):
    model = patch_model(lora(build("qwen3_moe")), caps())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name, param in copied.named_parameters():
            if "lora_B" in name:
                param.mul_(2)
    stock = lora(build("qwen3_moe"))
    assert_same(step(model, batch), step(stock, batch, stock=True))
    stock.load_state_dict(copied.state_dict())
    assert_same(step(copied, batch), step(stock, batch, stock=True))


def test_half_precision_is_no_further_from_float64_than_stock(wrapped):
    """Factors in float32 over a base in bfloat16, which PEFT makes of them by default, or in bfloat16."""

    def run(experts, dtype, x, index, w, g):
        experts.zero_grad()
        x, w = (t.to(dtype).clone().requires_grad_() for t in (x, w))
        y = experts(x, index, w)
        y.backward(g.to(dtype))
        trained = (p.grad for n, p in experts.named_parameters() if "lora_" in n)
        return [t.double() for t in (y.detach(), x.grad, w.grad, *trained)]

    for factors in (torch.float32, torch.bfloat16):
        errors = torch.zeros(2, 7)
        for seed in range(3):
            exact, stock, ours = (wrapped(seed, factors) for _ in range(3))
            exact.double().get_base_layer().config._experts_implementation = "eager"
            patch_experts(ours.get_base_layer(), LocalDispatch(100_000), "auto")
            ExpertAdapters([ours, ours.base_layer]).install(ours.get_base_layer())
            x, g = torch.randn(200, 64).bfloat16(), torch.randn(200, 64).bfloat16()
            call = x, torch.rand(200, 8).topk(2)[1], torch.rand(200, 2).bfloat16(), g
            want = run(exact, torch.float64, *call)
            for i, experts in enumerate((stock, ours)):
                found = run(experts, torch.bfloat16, *call)
                pairs = zip(found, want, strict=True)
                errors[i] += torch.stack([((a - b).square().mean() / b.square().mean()).float() for a, b in pairs])
        assert (errors > 0).all() and (errors[1].sqrt() <= 1.05 * errors[0].sqrt()).all(), errors


def test_refused_or_left_alone_by_name(build, batch, caps, lora, step, assert_same):
    with pytest.raises(ValueError, match="does not work with use_dora=True"):
        lora(build("qwen3_moe"), use_dora=True)
    with pytest.raises(ValueError, match="does not work with lora_dropout"):
        lora(build("qwen3_moe"), lora_dropout=0.1)
    with pytest.raises(ValueError, match="does not work with lora_bias=True"):
        lora(build("qwen3_moe"), lora_bias=True)
    options = dict(target_parameters=["experts.gate_up_proj_bias"])
    model = patch_model(lora(build("gpt_oss"), **options), caps())
    left = {str(e) for e in model.longmoe.entries if e.schedule is None}
    assert len(left) == 3 and all("an adapter is on gate_up_proj_bias" in line for line in left)
    assert_same(step(model, batch), step(lora(build("gpt_oss"), **options), batch, stock=True))
