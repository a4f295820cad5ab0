"""What a training step gives back, for each way in which losses are asked for."""

import pytest
import torch
from torch.nn import functional as F
from transformers import MixtralForCausalLM, Trainer, TrainingArguments

from hf_longmoe import LongMoEConfig, VocabConfig, patch_model
from hf_longmoe.integrations.transformers.deferred import DeferredLogits

NOT_KEPT = r"^The logits of a training step are not formed.*call the model without `labels`"


def inputs(batch):
    return {k: v for k, v in batch.items() if k != "labels"}


# -- outputs.logits --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("when", ["before backward", "after backward"])
def test_logits_of_a_training_step_raise_on_use(build, tiny, batch, formed, when):
    model = patch_model(build("mixtral"), tiny)
    output = model(**batch)
    if when == "after backward":
        output.loss.backward()
    logits = output.logits
    assert logits.shape == (2, 19, 101) and logits.dtype == torch.float64 and not logits.requires_grad
    assert "DeferredLogits(shape=(2, 19, 101)" in repr(logits) and "DeferredLogits" in f"{output}"
    assert logits.float().shape == logits.shape  # what Accelerate does to every output
    for use in (torch.argmax, torch.Tensor.detach, lambda x: x[..., :-1], lambda x: 1 + x, lambda x: x.float().sum()):
        with pytest.raises(RuntimeError, match=NOT_KEPT) as caught:
            use(logits)
        assert "\n" not in str(caught.value)
    assert not formed


def test_a_training_step_keeps_neither_hidden_states_nor_graph_alive(build, tiny, batch):
    model = patch_model(build("mixtral"), tiny)
    output = model(**batch)
    assert output.logits.source.operands is None and output.logits.grad_fn is None


def arguments(folder, **kwargs):
    return TrainingArguments(
        str(folder),
        max_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **kwargs,
    )


def rows(batch):
    return [{"input_ids": i, "labels": t} for i, t in zip(batch["input_ids"], batch["labels"], strict=True)]


class ReadsLogits(Trainer):
    """The usual custom loss: the model is given its labels, and its logits are read."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


class PopsLabels(ReadsLogits):
    """The way that the error names."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


def test_a_custom_compute_loss_gets_the_error_and_its_way_out_works(build, tiny, batch, tmp_path):
    stock, losses = build("mixtral", dtype=torch.float32), []
    for model, kind in ((stock, ReadsLogits), (None, PopsLabels)):
        model = model or patch_model(build("mixtral", dtype=torch.float32), tiny)
        trainer = kind(model=model, args=arguments(tmp_path), train_dataset=rows(batch))
        losses.append(trainer.train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    model = patch_model(build("mixtral", dtype=torch.float32), tiny)
    with pytest.raises(RuntimeError, match=NOT_KEPT):
        ReadsLogits(model=model, args=arguments(tmp_path), train_dataset=rows(batch)).train()


def test_without_labels_training_gives_full_stock_logits(build, tiny, batch, gradients, assert_same, loss_of):
    model = build("deepseek_v3")
    want = gradients(model, loss_of(model(**inputs(batch)).logits, batch["labels"]))
    logits = patch_model(model, tiny)(**inputs(batch)).logits
    assert type(logits) is torch.Tensor and logits.requires_grad
    assert_same(gradients(model, loss_of(logits, batch["labels"])), want)


@pytest.mark.parametrize("how", ["compute_loss_func", "label_smoothing_factor"])
def test_losses_that_the_trainer_takes_from_logits(build, tiny, batch, tmp_path, formed, how):
    """Both pop the labels, so they are computed from full stock logits: right, but not bounded."""

    def compute_loss_func(outputs, labels, num_items_in_batch=None):
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return loss / num_items_in_batch

    losses = []
    for patched in (False, True):
        model = build("mixtral", dtype=torch.float32)
        if patched:
            patch_model(model, tiny)
        if how == "compute_loss_func":
            trainer_arguments = dict(args=arguments(tmp_path), compute_loss_func=compute_loss_func)
        else:
            trainer_arguments = dict(args=arguments(tmp_path, label_smoothing_factor=0.3))
        trainer = Trainer(model=model, train_dataset=rows(batch), **trainer_arguments)
        losses.append(trainer.train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and len(formed) == 2


# -- label smoothing and z-loss --------------------------------------------------------------------------------------
def smooth(logits, labels, smoothing, z_loss):
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    return loss + z_loss * logits.logsumexp(-1).square()[labels != -100].mean()


class Clamped(MixtralForCausalLM):
    """Does to its logits what no schedule knows, before the stock loss."""

    def forward(self, *args, labels=None, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.clamp(-2.0, 2.0)
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, self.vocab_size)
        return output


@pytest.mark.parametrize("way", ["tiles", "formed", "eval with gradients"])
def test_label_smoothing_and_z_loss_hold_in_every_way_to_the_loss(build, batch, gradients, assert_same, way):
    model = build("mixtral")
    model.__class__ = Clamped if way == "formed" else MixtralForCausalLM
    model.train(way != "eval with gradients")
    want = smooth(model(**inputs(batch)).logits, batch["labels"], 0.2, 1e-2)
    grads = gradients(model, want)
    patch_model(model, LongMoEConfig(vocab=VocabConfig(budget="16KiB", label_smoothing=0.2, z_loss=1e-2)))
    loss = model(**batch).loss
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    assert_same(gradients(model, loss), grads)


def test_label_smoothing_that_cannot_be_applied_is_refused(build, batch):
    class OwnLoss(MixtralForCausalLM):
        def forward(self, *args, labels=None, **kwargs):
            output = super().forward(*args, **kwargs)
            output.loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return output

    model = build("mixtral")
    model.__class__ = OwnLoss
    patch_model(model, LongMoEConfig(vocab=VocabConfig(label_smoothing=0.1)))
    with pytest.raises(ValueError, match=r"vocab\.label_smoothing=0\.1 .* cannot be applied to OwnLoss"):
        model(**batch)


# -- the arguments of the loss ---------------------------------------------------------------------------------------
def shifted(batch):
    return F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]


OPTIONS = {
    "num_items_in_batch, an int": lambda batch: dict(num_items_in_batch=7),
    "num_items_in_batch, a tensor": lambda batch: dict(num_items_in_batch=torch.tensor(7)),
    "ignore_index": lambda batch: dict(ignore_index=int(batch["labels"][1, 5])),
    "shift_labels": lambda batch: dict(shift_labels=shifted(batch).roll(1, 0)),
    "shift_labels, flat": lambda batch: dict(shift_labels=shifted(batch).roll(1, 0).flatten()),
    "labels of int32": lambda batch: dict(labels=batch["labels"].int()),
    "all of them": lambda batch: dict(
        num_items_in_batch=3, ignore_index=int(batch["labels"][1, 5]), shift_labels=shifted(batch).clamp(min=0)
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_loss(build, tiny, batch, gradients, assert_same, option):
    model = build("mixtral", dtype=torch.float32)
    options = OPTIONS[option](batch)
    if "ignore_index" in options:  # the stock loss refuses -100 once another index is ignored
        batch["labels"] = batch["labels"].clamp(min=0)
    stock_options = {k: v.long() if k == "labels" else v for k, v in options.items()}
    plain = model(**batch).loss
    want = model(**{**batch, **stock_options}).loss
    assert option == "labels of int32" or abs(want - plain) > 1e-3  # the option does something
    grads = gradients(model, want)
    loss = patch_model(model, tiny)(**{**batch, **options}).loss
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    assert_same(gradients(model, loss), grads, tolerance=2e-5)


def test_logits_to_keep(build, tiny, batch, gradients, assert_same):
    model = build("mixtral", dtype=torch.float32)
    asked = {**batch, "logits_to_keep": 5, "labels": batch["labels"][:, -5:]}
    want = model(**asked).loss
    grads = gradients(model, want)
    output = patch_model(model, tiny)(**asked)
    assert output.logits.shape == (2, 5, 101)
    torch.testing.assert_close(output.loss, want, rtol=1e-6, atol=0)
    assert_same(gradients(model, output.loss), grads, tolerance=2e-5)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(logits_to_keep=5), r"^labels have shape \(2, 19\), but there are logits for \(2, 5\) tokens; give one"),
        (dict(labels=torch.zeros(2, 7, dtype=torch.long)), r"^labels have shape \(2, 7\)"),
        (dict(shift_labels=torch.zeros(3, dtype=torch.long)), r"^labels have shape \(3,\)"),
        (dict(labels=torch.full((2, 19), 101)), r"^labels contain 101, outside the vocabulary \[0, 101\)"),
        (dict(labels=torch.full((2, 19), -1)), r"^labels contain -1, outside"),
        (dict(labels=torch.zeros(2, 19)), r"^labels have dtype torch\.float32; give integers"),
        (dict(num_items_in_batch=0), r"^num_items=0"),
    ],
)
def test_bad_labels_are_one_line_errors(build, tiny, batch, change, message, mode):
    model = patch_model(build("mixtral"), tiny)
    with torch.set_grad_enabled(mode), pytest.raises(ValueError, match=message) as caught:
        model(**{**batch, **change})
    assert "\n" not in str(caught.value)
    model(**batch)  # and the model is as it was


def test_all_labels_masked(build, tiny, batch, gradients):
    """Zero, and connected to every parameter: the stock model gives NaN."""
    model = build("mixtral")
    batch["labels"] = torch.full_like(batch["labels"], -100)
    assert model(**batch).loss.isnan()
    loss = patch_model(model, tiny)(**batch).loss
    grads = gradients(model, loss)
    assert loss == 0 and grads.keys() == dict(model.named_parameters()).keys()
    assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_nothing_but_the_loss_is_needed_of_an_output(build, tiny, batch, family):
    model = patch_model(build(family), tiny)
    output = model(**batch, output_hidden_states=True)
    assert len(output.hidden_states) == 4 and type(output.logits) is DeferredLogits


def test_the_router_losss_coefficient_is_read_at_each_call(build, batch):
    model = build("mixtral", output_router_logits=True)
    model.router_aux_loss_coef = 0.0
    with patch_model(model).longmoe:
        without = model(**batch).loss
        model.router_aux_loss_coef = 0.5
        patched = model(**batch)
    stock = model(**batch)
    torch.testing.assert_close(patched.loss, without + 0.5 * patched.aux_loss, check_dtype=False)
    torch.testing.assert_close(patched.aux_loss, stock.aux_loss, check_dtype=False)
