"""A patched model that is not being trained gives what the stock model gives, and forms logits only if asked."""

import copy
import pickle

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_longmoe import patch_model
from hf_longmoe.integrations.transformers.deferred import DeferredLogits

FAMILIES = ["mixtral", "deepseek_v3", "gpt_oss", "granitemoe", "llama"]


def both(build, family, config=None, dtype=torch.float32):
    model = build(family, dtype=dtype).eval()
    return model, patch_model(copy.deepcopy(model), config)


@pytest.mark.parametrize("family", FAMILIES)
def test_generate(build, tiny, family, batch):
    stock, patched = both(build, family, tiny)
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, use_cache=True)
    want = stock.generate(batch["input_ids"], **options)
    assert len(set(want[0, 19:].tolist())) > 2  # it says something
    assert torch.equal(patched.generate(batch["input_ids"], **options), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_without_labels(build, tiny, family, batch):
    stock, patched = both(build, family, tiny, torch.float64)
    del batch["labels"]
    want, got = stock(**batch), patched(**batch)
    assert list(got.keys()) == list(want.keys()) and type(got.logits) is torch.Tensor
    torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=1e-11)
    assert got.logits.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_loss_and_logits_on_demand(build, tiny, formed, family, batch, mode):
    stock, patched = both(build, family, tiny)
    with mode():
        want = stock(**batch)
        formed.clear()
        got = patched(**batch)
    assert list(got.keys()) == list(want.keys())
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
    assert (got.logits.shape, got.logits.dtype, got.logits.device) == (
        want.logits.shape,
        want.logits.dtype,
        want.logits.device,
    )
    assert not formed  # not even with their shape asked for
    numbers = got.logits.numpy()  # outside of the mode: as stock logits, without a gradient
    assert formed == [(2, 19, 101)]
    np.testing.assert_allclose(numbers, want.logits.numpy(), rtol=0, atol=2e-5)
    assert torch.equal(got.logits.argmax(-1), want.logits.argmax(-1)) and len(formed) == 1  # formed once


USES = {
    "index": lambda logits: logits[:, -1],
    "softmax": lambda logits: logits.softmax(-1),
    "function": lambda logits: torch.log_softmax(logits, dim=-1),
    "second argument": lambda logits: torch.ones(2, 19, 101) + logits,
    "list": lambda logits: torch.cat([logits, logits]),
    "numpy": lambda logits: torch.from_numpy(np.asarray(logits) * 2),
    "tolist": lambda logits: torch.tensor(logits.tolist()),
    "copy": copy.deepcopy,
    "pickle": lambda logits: pickle.loads(pickle.dumps(logits)),
    "cast": lambda logits: logits.to(torch.bfloat16) + 0,
    "device": lambda logits: logits.cpu().contiguous(),
    "iterate": lambda logits: torch.stack(list(logits)),
    "written to": lambda logits: logits.fill_(3.0) + logits,
    "scaled in place": lambda logits: (logits.mul_(2.0), logits)[1] + 0,
    "scaled": lambda logits: (logits / 3.0 * 2).tanh() * 4.0 + 0,
    "einsum": lambda logits: torch.einsum("bsv,bsv->bs", logits, logits),
}


@pytest.mark.parametrize("use", USES)
def test_whatever_is_done_with_them(build, tiny, batch, use):
    stock, patched = both(build, "mixtral", tiny)
    with torch.no_grad():
        want, got = stock(**batch).logits, patched(**batch).logits
        want, got = USES[use](want), USES[use](got)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, want, rtol=0, atol=2e-2 if use == "cast" else 2e-3)


def test_they_print_as_the_stock_logits(build, tiny, batch):
    stock, patched = both(build, "mixtral", tiny)
    with torch.no_grad():
        want, got = stock(**batch), patched(**batch)
    assert repr(got.logits) == f"{got.logits}" == repr(got.logits.clone())
    assert repr(want.logits)[:9] == repr(got.logits)[:9] == "tensor([["


def test_weights_that_have_changed_since_are_noticed(build, tiny, batch):
    _, patched = both(build, "mixtral", tiny)
    with torch.no_grad():
        logits = patched(**batch).logits
        patched.lm_head.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="have changed since"):
            logits.argmax(-1)


def test_autocast_at_the_time_of_the_call_counts(build, tiny, batch):
    stock, patched = both(build, "mixtral", tiny)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            want, got = stock(**batch), patched(**batch)
        assert got.logits.dtype == want.logits.dtype == torch.bfloat16
        assert type(got.logits) is DeferredLogits
        torch.testing.assert_close(got.logits.clone(), want.logits, rtol=0.02, atol=0.05)
    torch.testing.assert_close(got.loss, want.loss, rtol=2e-3, atol=0)


def test_eval_with_gradients(build, tiny, batch, gradients, assert_same):
    """Scores of a model in eval mode, say for attribution: stock logits, and gradients through loss and logits."""
    stock, patched = both(build, "mixtral", tiny)
    got, want = patched(**batch), stock(**batch)
    assert type(got.logits) is torch.Tensor
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
    grads = [gradients(m, out.loss + out.logits.square().mean()) for m, out in ((patched, got), (stock, want))]
    assert_same(*grads, tolerance=2e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("router_logits", [False, True])
def test_a_tuple_for_return_dict_false(build, tiny, batch, training, router_logits):
    model = build("mixtral", dtype=torch.float32).train(training)
    batch["output_router_logits"] = router_logits
    batch["return_dict"] = False
    with torch.set_grad_enabled(training):
        want = model(**batch)
        got = patch_model(model, tiny)(**batch)
    assert isinstance(got, tuple) and len(got) == len(want)
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=0)
    if not training:
        at = 2 if router_logits else 1
        torch.testing.assert_close(got[at] + 0, want[at], rtol=0, atol=2e-5)


def test_positional_arguments(build, tiny, batch):
    stock, patched = both(build, "mixtral", tiny)
    arguments = (batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"])
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            got = patched.train(mode)(*arguments)
            torch.testing.assert_close(got.loss, stock.train(mode)(*arguments).loss, rtol=1e-6, atol=0)
            assert type(got.logits) is DeferredLogits
            got = patched(*arguments, output_router_logits=True)
            torch.testing.assert_close(got.loss, stock(*arguments, output_router_logits=True).loss, rtol=1e-6, atol=0)
    for wrong in (dict(input_ids=batch["input_ids"]), dict(labels=None)):
        with pytest.raises(TypeError, match="multiple values"):
            patched(*arguments, **wrong)
    with pytest.raises(TypeError):
        patched(*arguments, *range(40))


# -- Trainer.evaluate ------------------------------------------------------------------------------------------------
class Rows(torch.utils.data.Dataset):
    def __init__(self, count=5):
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(3, 101, (count, 12), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        labels = self.ids[i].clone()
        labels[: i + 1] = -100
        return {"input_ids": self.ids[i], "labels": labels}


def accuracy(prediction):
    guesses, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    valid = labels != -100
    return {
        "accuracy": float((guesses == labels)[valid].mean()),
        "logits": float(np.abs(prediction.predictions).sum()),
    }


def evaluate(model, folder, metrics, **arguments):
    args = TrainingArguments(
        str(folder), per_device_eval_batch_size=2, report_to="none", use_cpu=True, disable_tqdm=True, **arguments
    )
    trainer = Trainer(model=model, args=args, compute_metrics=metrics)
    found = trainer.evaluate(Rows())
    predictions = trainer.predict(Rows()).predictions
    return {k: v for k, v in found.items() if "time" not in k and "per_second" not in k}, predictions


@pytest.mark.parametrize("metrics", [None, accuracy])
@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_evaluate(build, tiny, tmp_path, formed, metrics, bf16):
    stock, patched = both(build, "mixtral", tiny)
    want, want_predictions = evaluate(stock, tmp_path, metrics, bf16=bf16)
    formed.clear()
    got, got_predictions = evaluate(patched, tmp_path, metrics, bf16=bf16)
    assert got.keys() == want.keys()
    for name in want:
        assert got[name] == pytest.approx(want[name], rel=2e-3 if bf16 else 1e-6, abs=0.03 if bf16 else 0), name
    assert got_predictions.dtype == want_predictions.dtype
    np.testing.assert_allclose(got_predictions, want_predictions, rtol=0, atol=0.05 if bf16 else 2e-5)
    assert len(formed) == (3 if metrics is None else 6)  # `predict` asks for logits, `evaluate` if metrics do


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_prediction_loss_only_never_forms_logits(build, tiny, tmp_path, formed, family):
    stock, patched = both(build, family, tiny)
    want, _ = evaluate(stock, tmp_path, accuracy, prediction_loss_only=True)
    formed.clear()
    got, predictions = evaluate(patched, tmp_path, accuracy, prediction_loss_only=True)
    assert predictions is None and not formed
    assert got == {k: pytest.approx(v, rel=1e-6) for k, v in want.items()}
