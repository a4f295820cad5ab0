"""What `patch_model` does to a model as an object: undoable, repeatable, copyable, reported."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    BertConfig,
    ViTConfig,
)

from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig, patch_model, unpatch_model
from hf_longmoe.schedules.vocab import tile_bytes, tile_rows

_ENCODER = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)


def config(dispatch="1MiB", vocab="1MiB", **kwargs):
    return LongMoEConfig(dispatch=DispatchConfig(budget=dispatch, **kwargs), vocab=VocabConfig(budget=vocab))


def state(model):
    return {name: set(vars(module)) for name, module in model.named_modules()}


def hooks(model):
    """Ours; Transformers has its own."""
    found = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return [hook for hook in found if hook.__module__.startswith("hf_longmoe")]


def test_the_same_config_twice_changes_nothing(build):
    model = build("deepseek_v3")
    assert patch_model(model, config()) is model
    patch, before = model.longmoe, {name: dict(vars(module)) for name, module in model.named_modules()}
    assert patch_model(model, config()) is model
    assert model.longmoe is patch
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert all(after[n][k] is v for n in before for k, v in before[n].items() if k != "longmoe")


def test_another_config_patches_anew(build):
    model = build("mixtral")
    clean = state(model)
    patch_model(model, config("1MiB"))
    once = state(model)
    patch_model(model, config("2MiB"))
    assert model.longmoe.config == config("2MiB")
    assert model.model.layers[0].mlp.experts.longmoe_schedule.budget == 2 << 20
    assert state(model) == once
    assert state(unpatch_model(model)) == clean
    assert state(unpatch_model(model)) == clean  # and of a model that is not patched, nothing


def test_context_manager(build, batch):
    model = build("mixtral")
    clean = state(model)
    with pytest.raises(ZeroDivisionError):
        with patch_model(model, config()).longmoe as patched:
            assert patched is model and "longmoe" in vars(model)
            raise ZeroDivisionError
    assert state(model) == clean


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "llama"])
def test_report(build, family):
    model = patch_model(build(family), config()).longmoe.model
    entries = {entry.module: entry for entry in model.longmoe.entries}
    experts = [n for n, m in model.named_modules() if n.endswith(".experts")]
    dense = ["model.layers.0.mlp"] if family == "deepseek_v3" else []
    shared = [n for n, m in model.named_modules() if n.endswith("shared_experts")]
    router_loss = ["router logits"] if family == "mixtral" else []
    assert sorted(entries) == sorted([*experts, *dense, *shared, *router_loss, "lm_head"])
    assert all(entry.schedule is not None for entry in entries.values())
    assert all(entries[name].schedule == "expert-major waves" for name in experts)
    assert all(entries[name].schedule == "token tiles" for name in dense + shared)
    rows = tile_rows("1MiB", 101, 32, dtype=torch.float64)
    line = f"lm_head: vocab, tiles ({rows} tokens at a time)"
    assert str(entries["lm_head"]) == line and line in str(model.longmoe).splitlines()


@pytest.mark.parametrize("off", ["dispatch", "vocab"])
def test_a_part_that_is_off_is_left_as_it_is_and_reported(build, batch, off):
    model = build("mixtral")
    patch_model(model, LongMoEConfig(**{off: None}))
    left = [entry for entry in model.longmoe.entries if entry.schedule is None]
    assert left and all(e.component == off and e.note == f"{off}=None in the config" for e in left)
    assert ("forward" in vars(model.lm_head)) == (off != "vocab")
    assert ("forward" in vars(model.model.layers[0].mlp.experts)) == (off != "dispatch")
    output = model(**batch)
    assert type(output.logits) is torch.Tensor or off != "vocab"


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_a_deep_copy_runs_on_its_own_weights(build, family, batch, gradients, assert_same, tiny):
    model = build(family)
    batch["output_router_logits"] = True
    other = build(family)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(1.5)
    want = gradients(patch_model(other, tiny), other(**batch).loss)
    mine = gradients(patch_model(model, tiny), model(**batch).loss)
    model.activation_checkpointing_enable()

    double = copy.deepcopy(model)
    with torch.no_grad():
        for param in double.parameters():
            param.mul_(1.5)
    model.zero_grad()
    assert_same(gradients(double, double(**batch).loss), want, tolerance=0)
    assert all(param.grad is None for param in model.parameters())
    assert_same(gradients(model, model(**batch).loss), mine, tolerance=0)

    assert double.longmoe.model is double
    unpatch_model(double)
    assert not hooks(double) and not any("longmoe_schedule" in vars(module) for module in double.modules())
    assert "longmoe" in vars(model) and hooks(model)
    assert_same(gradients(model, model(**batch).loss), mine, tolerance=0)


def test_state_dict_and_save_pretrained(build, family, batch, tmp_path):
    model = build(family, dtype=torch.float32).eval()
    keys, logits = list(model.state_dict()), model(**batch).logits
    patch_model(model)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, experts_implementation="eager")
    assert "longmoe" not in vars(loaded) and list(loaded.state_dict()) == keys
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    assert torch.equal(loaded.eval()(**batch).logits, logits)
    torch.testing.assert_close(patch_model(loaded)(**batch).logits, model(**batch).logits, rtol=0, atol=0)


def test_loading_weights_into_a_patched_model(build, batch):
    model, other = patch_model(build("mixtral")), build("mixtral", tie_word_embeddings=False)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(1.5)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(**batch).loss.float(), other(**batch).loss, rtol=1e-6, atol=0)


def test_no_caps_leave_a_model_as_it_is(build, batch):
    """A plan's, of a model that fits as it is."""
    model = build("mixtral")
    clean, loss = state(model), model(**batch).loss
    none = LongMoEConfig(dispatch=None, vocab=None, boundaries=None, optimizer=None)
    assert patch_model(model, none) is model and "no caps" in str(model.longmoe)
    assert torch.equal(model(**batch).loss, loss) and model(**batch).logits.shape[-1] == 101
    patch_model(model)
    assert str(model.longmoe.entries[0]).startswith("model.layers.0")
    assert "no caps" in str(patch_model(model, none).longmoe)
    assert state(unpatch_model(model)) == clean


# -- nothing to patch ------------------------------------------------------------------------------------------------
def test_an_encoder_of_images():
    model = AutoModelForImageClassification.from_config(ViTConfig(**_ENCODER, image_size=8, patch_size=4))
    clean = state(model)
    with pytest.raises(ValueError, match=r"nothing to patch\. Supported: .* ViTForImageClassification has no experts"):
        patch_model(model)
    assert state(model) == clean


def test_a_masked_language_model():
    model = AutoModelForMaskedLM.from_config(BertConfig(**_ENCODER, vocab_size=101))
    with pytest.raises(ValueError, match=r"nothing to patch.*ForMaskedLMLoss, not ForCausalLMLoss") as caught:
        patch_model(model)
    assert "\n" not in str(caught.value)


class RemoteCodeMoE(nn.Module):
    """Experts as remote code has them: a list of modules, not behind the experts interface."""

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return sum(expert(x) * weights[..., i, None] for i, expert in enumerate(self.experts))


def test_experts_in_a_module_list_are_left_alone_and_the_head_is_not(build, batch, gradients, assert_same, loss_of):
    model = build("llama")
    model.model.layers[1].mlp = RemoteCodeMoE(model.config).to(torch.float64)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    want = gradients(model, loss_of(model(**inputs).logits, batch["labels"]))
    patch_model(model, config())
    left, head = model.longmoe.entries
    assert (left.module, left.component, left.schedule) == ("model.layers.1.mlp.experts", "dispatch", None)
    assert "modules of their own" in left.note and "trust_remote_code=False" in left.note
    assert head.module == "lm_head" and head.schedule == "tiles"
    assert_same(gradients(model, model(**batch).loss), want)
    with pytest.raises(ValueError, match="nothing to patch.*modules of their own"):
        patch_model(model, LongMoEConfig(vocab=None))


def test_no_transformers_model():
    with pytest.raises(ValueError, match="Linear holds no Transformers model"):
        patch_model(nn.Linear(2, 2))


class NormHead(nn.Linear):
    """A head with a forward of its own: the schedule must not take it for a plain projection."""

    def forward(self, x):
        return nn.functional.linear(x, nn.functional.normalize(self.weight))


def test_a_head_with_a_forward_of_its_own_is_left_alone(build, batch):
    model = build("mixtral")
    model.lm_head = NormHead(32, 101, bias=False, dtype=torch.float64)
    loss = model(**batch).loss
    patch_model(model, config())
    (entry,) = [entry for entry in model.longmoe.entries if entry.component == "vocab"]
    assert entry.schedule is None and entry.note == "NormHead has a forward of its own"
    torch.testing.assert_close(model(**batch).loss, loss, rtol=1e-6, atol=0)


# -- budgets ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("caps", "message"),
    [
        (dict(dispatch="1KiB"), r"^dispatch\.budget=1024 .*give at least \d+"),
        (dict(vocab="1KiB"), r"^vocab\.budget=1024 .*would work"),
        (dict(dispatch="1KiB", kernel="model"), r"^dispatch\.budget=1024 "),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_a_budget_too_small_is_refused_before_anything_is_changed(build, batch, caps, message, again):
    model = build("deepseek_v3")
    if again:
        patch_model(model, config())
    before, loss = state(model), model(**batch).loss
    with pytest.raises(ValueError, match=message) as caught:
        patch_model(model, config(**caps))
    assert "\n" not in str(caught.value)
    assert state(model) == before
    if again:
        assert model.longmoe.config == config()
    assert torch.equal(model(**batch).loss, loss)


def test_the_budget_that_a_message_gives_works(build):
    model = build("mixtral")
    with pytest.raises(ValueError) as caught:
        patch_model(model, config(dispatch=64))
    least = int(str(caught.value).rstrip(".").split()[-1])
    patch_model(model, config(dispatch=least))
    with pytest.raises(ValueError):
        patch_model(model, config(dispatch=least - 1))


def test_a_vocab_budget_that_only_autocast_would_pass_is_refused_at_once(build, batch):
    """Autocast is chosen after the patch, and needs more than float32: a tile's gradient in half precision too."""
    wide, half = (tile_bytes(8, 101, 32, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert wide < half
    model = build("llama", dtype=torch.float32)
    clean = state(model)
    with pytest.raises(ValueError, match=rf"^vocab\.budget={half - 1} .*needs {half} bytes.*autocast"):
        patch_model(model, config(vocab=half - 1))
    assert state(model) == clean
    patch_model(model, config(vocab=half))
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch).loss.backward()
    patch_model(build("llama", dtype=torch.float64), config(vocab=tile_bytes(8, 101, 32, dtype=torch.float64)))


def test_two_models_of_one_config():
    """Patching one leaves the other."""
    shared = AutoConfig.for_model("mixtral", num_hidden_layers=1, hidden_size=32, intermediate_size=12, vocab_size=101)
    first, second = (AutoModelForCausalLM.from_config(shared) for _ in range(2))
    clean = state(second)
    patch_model(first)
    assert state(second) == clean and "longmoe" not in vars(second)
