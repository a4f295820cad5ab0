"""Whatever a model does to its logits: by the schedule if it can express that, by the stock loss if not; exact."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForSeq2SeqLM, Gemma2Config, Gemma2ForCausalLM, MixtralForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import logging

from hf_longmoe import LongMoEConfig, VocabConfig, patch_model, unpatch_model


def head_entry(model):
    (entry,) = [entry for entry in model.longmoe.entries if entry.component == "vocab"]
    return entry


def with_head(change):
    """A Mixtral whose forward does `change(model, logits)` between the head and `loss_function`."""

    class Changed(MixtralForCausalLM):
        def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
            hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
            logits = change(self, self.lm_head(hidden))
            loss = None if labels is None else self.loss_function(logits, labels, self.vocab_size, **kwargs)
            return CausalLMOutput(loss=loss, logits=logits)

    return Changed


def in_place(change):
    """The change as a statement, its value not used."""

    def changed(model, logits):
        change(logits)
        return logits

    return changed


def set_padding(logits):
    logits[..., 90:] = -30.0


def looked_at(model, logits):
    with torch.no_grad():
        model.seen = logits.argmax(-1)
    return logits


class Odd(torch.autograd.Function):
    """It takes tensors without asking them, and must get the graph as well. Its gradient is not that of its value."""

    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3.0


KNOWN = {
    "nothing": lambda model, logits: logits,
    "times": lambda model, logits: 0.5 * logits * 3,
    "divided": lambda model, logits: torch.div(logits, 4.0),
    "times, in place": in_place(lambda logits: logits.mul_(0.5)),
    "divided, in place": in_place(lambda logits: logits.__itruediv__(3.0)),
    "augmented assignment": lambda model, logits: logits.__imul__(0.5),
    "soft cap": lambda model, logits: torch.tanh(logits / 2.0) * 2.0,
    "soft cap, in place": lambda model, logits: (logits.div_(2.0).tanh_(), logits * 2.0)[1],
    "soft cap of a scaled": lambda model, logits: 3 * (0.25 * logits / 3).tanh(),
    "casts": lambda model, logits: logits.to(torch.float64).to(logits.device).to(dtype=torch.float64),
    "looks at the shape": lambda model, logits: logits * (1.0 / logits.shape[-1] * len(logits) * logits.dim()),
}
UNKNOWN = {
    "clamp": lambda model, logits: logits.clamp(-1.0, 1.0),
    "clamp_": in_place(lambda logits: logits.clamp_(-1.0, 1.0)),
    "log_softmax": lambda model, logits: F.log_softmax(logits, dim=-1),
    "add": lambda model, logits: logits + model.lm_head.weight.sum(-1),
    "mul": lambda model, logits: logits * model.lm_head.weight.mean(),
    "__setitem__": in_place(set_padding),
    "tanh": lambda model, logits: torch.tanh(logits * 2.0).square() * 2.0,
    "mul_ after a cap": lambda model, logits: (torch.tanh(logits) * 2.0).mul_(0.5),
    "only a tanh": lambda model, logits: torch.tanh(logits),
    "a gradient-free look": looked_at,
    "an autograd.Function": lambda model, logits: Odd.apply(logits * 0.5),
}


@pytest.mark.parametrize("change", [*KNOWN, *UNKNOWN])
def test_every_change_of_the_logits(build, batch, gradients, assert_same, loss_of, change):
    model = build("mixtral")
    model.__class__ = with_head({**KNOWN, **UNKNOWN}[change])
    want = loss_of(model(batch["input_ids"]).logits, batch["labels"])
    plain = loss_of(MixtralForCausalLM.forward(model, batch["input_ids"]).logits, batch["labels"])
    same = change in ("nothing", "casts", "log_softmax", "a gradient-free look", "an autograd.Function")
    assert same or abs(want - plain) > 1e-4
    grads = gradients(model, want)
    patch_model(model, LongMoEConfig(vocab=VocabConfig(budget="24KiB")))
    assert head_entry(model).schedule == "tiles"
    output = model(**batch)
    # The stock loss, to which an unknown change falls back, is float32.
    tolerance = 1e-12 if change in KNOWN else 1e-6
    torch.testing.assert_close(output.loss.double(), want, rtol=tolerance, atol=0)
    assert_same(gradients(model, output.loss), grads, tolerance=tolerance if tolerance < 1e-9 else 2e-5)
    entry = head_entry(model)
    if change in KNOWN:
        assert entry.schedule == "tiles"
        with pytest.raises(RuntimeError, match="not formed"):
            output.logits + 1
    else:
        assert entry.schedule is None and entry.note.startswith("the model applies '") and "left alone" in str(entry)
        (model(**batch).logits + 1).sum().backward()  # they exist, as the stock ones do


def test_the_report_is_corrected_once_and_the_warning_given_once(build, tiny, batch, caplog):
    model = build("mixtral")
    model.__class__ = with_head(UNKNOWN["clamp"])
    patch_model(model, tiny)
    entries = len(model.longmoe.entries)
    logging.enable_propagation()
    try:
        for _ in range(3):
            model(**batch)
    finally:
        logging.disable_propagation()
    assert len(model.longmoe.entries) == entries
    (record,) = [record for record in caplog.records if "'clamp'" in record.message]
    assert record.message.startswith("lm_head: vocab, left alone (the model applies 'clamp' to its logits")


def test_a_look_after_the_loss_is_exact_too(build, tiny, batch, gradients, assert_same, loss_of):
    """With gradients, after the schedule has given the loss: a z-loss of the model's own, say."""

    class Regularised(MixtralForCausalLM):
        def forward(self, *args, labels=None, **kwargs):
            output = super().forward(*args, labels=labels, **kwargs)
            output.extra = output.logits.logsumexp(-1).square().mean()
            return output

    model = build("mixtral")
    model.__class__ = Regularised
    output = model(batch["input_ids"])
    want = gradients(model, loss_of(output.logits, batch["labels"]) + output.extra)
    patch_model(model, tiny)
    output = model(**batch)
    assert_same(gradients(model, output.loss + output.extra), want)
    assert "'logsumexp'" in head_entry(model).note


@pytest.mark.parametrize("kind", ["function", "autograd.Function"])
def test_a_loss_function_set_after_the_patch_gets_real_logits(build, tiny, batch, gradients, assert_same, kind):
    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            ctx.save_for_backward(logits)
            return logits.square().mean()

        @staticmethod
        def backward(ctx, gradient):
            (logits,) = ctx.saved_tensors
            return gradient * 2 * logits / logits.numel()

    def loss_function(logits, labels, vocab_size, **kwargs):
        return Squares.apply(logits) if kind == "autograd.Function" else logits.square().mean()

    model = build("mixtral")
    model.loss_function = loss_function
    want = gradients(model, model(**batch).loss)
    del model._loss_function
    patch_model(model, tiny)
    model.loss_function = loss_function
    assert_same(gradients(model, model(**batch).loss), want)
    assert head_entry(model).schedule is None
    unpatch_model(model)
    assert model.loss_function is loss_function  # not ours to take away
    patch_model(model, tiny)
    assert "its loss is loss_function, not ForCausalLMLoss" in head_entry(model).note


def test_a_model_that_never_calls_its_head_is_exact_and_reported(build, tiny, batch, gradients, assert_same):
    class ByHand(MixtralForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            logits = F.linear(self.model(input_ids).last_hidden_state, self.lm_head.weight)
            return CausalLMOutput(loss=F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))

    model = build("mixtral")
    model.__class__ = ByHand
    want = gradients(model, model(**batch).loss)
    patch_model(model, tiny)
    assert_same(gradients(model, model(**batch).loss), want)
    assert head_entry(model).note == "the model computes its loss without calling its LM head"


# -- whole models ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["plain", "non-reentrant"])
def test_gemma2_has_a_soft_cap(batch, gradients, assert_same, loss_of, mode):
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=101,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        final_logit_softcapping=3.0,
    )
    model = Gemma2ForCausalLM(config).double().train()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # tied: logits far into the cap
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    logits = model(**inputs).logits
    assert logits.abs().max() > 2.5
    want = loss_of(logits, batch["labels"])
    grads = gradients(model, want)
    patch_model(model, LongMoEConfig(vocab=VocabConfig(budget="24KiB")))
    if mode != "plain":
        model.activation_checkpointing_enable({"use_reentrant": False})
    loss = model(**batch).loss
    assert head_entry(model).schedule == "tiles" and "tied" in head_entry(model).note
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    assert_same(gradients(model, loss), grads)


def test_a_soft_cap_counts_in_the_budget():
    """A second buffer keeps the capped logits: where it does not fit is said when patching, not in the first step."""
    config = dict(vocab_size=101, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, head_dim=8)
    model = Gemma2ForCausalLM(Gemma2Config(**config, num_key_value_heads=2, intermediate_size=24))
    budget = LongMoEConfig(vocab=VocabConfig(budget=8 * (101 * 6 + 32 * 10 + 128)))
    with pytest.raises(ValueError, match=r"^vocab\.budget="):
        patch_model(model, budget)
    model.config.final_logit_softcapping = None
    patch_model(model, budget)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoders_with_a_loss_of_their_own(batch, gradients, assert_same, family):
    torch.manual_seed(0)
    sizes = dict(d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, dropout_rate=0.0)
    if family == "bart":
        sizes = dict(
            d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0
        )
        sizes.update(encoder_attention_heads=2, decoder_attention_heads=2)
    config = AutoConfig.for_model(family, vocab_size=101, decoder_start_token_id=0, **sizes)
    model = AutoModelForSeq2SeqLM.from_config(config).train()
    want = model(**batch)
    grads = gradients(model, want.loss)
    patch_model(model)
    assert head_entry(model).schedule == "tiles"  # nothing about it is odd until it runs
    got = model(**batch)
    assert torch.equal(got.loss, want.loss) and torch.equal(got.logits, want.logits)
    assert_same(gradients(model, got.loss), grads, tolerance=0)
    assert head_entry(model).schedule is None and head_entry(model).note.startswith("the model applies '")


def test_a_head_that_is_new_since_the_patch_is_reported_and_taken_over(build, tiny, batch, formed):
    """`resize_token_embeddings` makes one."""
    model = patch_model(build("mixtral", torch.float32), tiny)
    for _ in range(2):
        model.resize_token_embeddings(101, mean_resizing=False)  # the same size: nothing new
        model(**batch)
        assert not formed and head_entry(model).schedule == "tiles"
    model.resize_token_embeddings(110, mean_resizing=False)
    loss = model(**batch).loss
    assert head_entry(model).schedule is None and "calls another than was patched" in head_entry(model).note
    patch_model(model, tiny)
    output = model(**batch)
    assert head_entry(model).schedule == "tiles"
    torch.testing.assert_close(output.loss, loss, rtol=1e-6, atol=0)
    with pytest.raises(RuntimeError, match="logits of a training step are not formed"):
        output.logits.sum()
    assert not any("longmoe_head" in vars(m) for m in unpatch_model(model).modules())
