"""`Trainer.train` on a patched model: the loss curve of the stock one, under the arguments that people set."""

from functools import partial

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_longmoe import patch_model


class Rows(torch.utils.data.Dataset):
    def __init__(self, count=12):
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(3, 101, (count, 16), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        labels = self.ids[i].clone()
        labels[: i % 5] = -100  # batches with unequal numbers of labels
        return {"input_ids": self.ids[i], "labels": labels}


def trainer_of(model, folder, **arguments):
    given = dict(
        max_steps=3,
        per_device_train_batch_size=2,
        optim="sgd",  # AdamW's first steps are signs of gradients: a rounding error of a small one is a step
        learning_rate=0.3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    args = TrainingArguments(str(folder), **{**given, **arguments})
    return Trainer(model=model, args=args, train_dataset=Rows(), eval_dataset=Rows(4))


def curve(trainer, **options):
    trainer.train(**options)
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


def assert_close(got, want, tolerance=1e-5):
    assert len(got) == len(want) >= 2 and len({loss for loss, _ in want}) == len(want)
    for (loss, norm), (stock_loss, stock_norm) in zip(got, want, strict=True):
        assert loss == pytest.approx(stock_loss, rel=tolerance)
        assert norm == pytest.approx(stock_norm, rel=10 * tolerance)


def assert_same_weights(got, want, tolerance=1e-4):
    for (name, a), b in zip(got.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * b.abs().max().item(), msg=name)


ARGUMENTS = {
    "plain": {},
    "accumulation": dict(gradient_accumulation_steps=2),
    "checkpointing": dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}),
    "re-entrant checkpointing": dict(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    ),
    "clipping": dict(max_grad_norm=0.05),
    "all at once": dict(
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        gradient_accumulation_steps=2,
        max_grad_norm=0.05,
        average_tokens_across_devices=False,
    ),
    "AdamW": dict(optim="adamw_torch", learning_rate=1e-2),
}
CASES = [("mixtral", name) for name in ARGUMENTS] + [("deepseek_v3", n) for n in ARGUMENTS if "checkpointing" in n]


@pytest.fixture(scope="module")
def stock_runs():
    """Curves and weights of stock runs, which several tests compare with."""
    return {}


@pytest.mark.parametrize(("family", "name"), [*CASES, ("deepseek_v3", "all at once")])
def test_the_stock_loss_curve(build, tiny, tmp_path, stock_runs, family, name):
    arguments = ARGUMENTS[name]
    # What may change memory only is compared with the plain stock run.
    numbers = {k: v for k, v in arguments.items() if "checkpointing" not in k}
    key = (family, *sorted(numbers.items()))
    if key not in stock_runs:
        model = build(family, dtype=torch.float32)
        stock_runs[key] = (curve(trainer_of(model, tmp_path / "stock", **numbers)), model)
    want, stock = stock_runs[key]
    model = patch_model(build(family, dtype=torch.float32), tiny)
    assert_close(curve(trainer_of(model, tmp_path / "ours", **arguments)), want)
    if name != "AdamW":
        assert_same_weights(model, stock)
    assert all(entry.schedule is not None for entry in model.longmoe.entries)


@pytest.mark.parametrize(("family", "checkpointing"), [("mixtral", False), ("deepseek_v3", True)])
def test_bf16(build, tiny, tmp_path, family, checkpointing):
    """Autocast: both round to bf16 in places, so their curves agree to bf16; both stay near float32's."""
    curves = []
    for bf16, patched in ((False, False), (True, False), (True, True)):
        model = build(family, dtype=torch.float32, experts="grouped_mm")
        if patched:
            patch_model(model, tiny)
        options = dict(bf16=bf16, gradient_checkpointing=checkpointing and patched)
        curves.append(curve(trainer_of(model, tmp_path / f"{bf16}{patched}", **options)))
    exact, stock, ours = curves
    for at in range(3):
        assert ours[at][0] == pytest.approx(exact[at][0], rel=1e-2)
        assert ours[at][0] == pytest.approx(stock[at][0], rel=1e-2)


def test_the_router_loss_under_the_trainer(build, tiny, tmp_path):
    curves = []
    for patched in (False, True):
        model = build("mixtral", dtype=torch.float32, output_router_logits=True, router_aux_loss_coef=0.5)
        if patched:
            patch_model(model, tiny)
        curves.append(curve(trainer_of(model, tmp_path / f"{patched}", gradient_checkpointing=patched)))
    assert_close(curves[1], curves[0])


# gpt_oss: the stock Trainer 5.24 does not read back the experts of the families whose checkpoints it saves in another
# layout (mixtral, say), patched or not.
@pytest.mark.parametrize("first", [False, True])
def test_resume_from_checkpoint(build, tiny, tmp_path, first):
    """A run interrupted by a checkpoint, of a patched model or of a stock one, goes on as if it had not been."""
    build = partial(build, "gpt_oss", dtype=torch.float32)
    whole = curve(trainer_of(patch_model(build(), tiny), tmp_path / "whole", max_steps=4))
    model = build()
    if first:
        patch_model(model, tiny)
    saving = dict(max_steps=4, save_strategy="steps", save_steps=2)
    curve(trainer_of(model, tmp_path / "run", **saving))
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert (checkpoint / "model.safetensors").exists()
    model = patch_model(build(), tiny)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    resumed = curve(trainer_of(model, tmp_path / "run", **saving), resume_from_checkpoint=str(checkpoint))
    assert_close(resumed, whole)


def test_load_best_model_at_end(build, tiny, tmp_path):
    best = []
    for patched in (False, True):
        model = build("gpt_oss", dtype=torch.float32)
        if patched:
            patch_model(model, tiny)
        arguments = dict(save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1, learning_rate=50.0)
        trainer = trainer_of(model, tmp_path / f"{patched}", load_best_model_at_end=True, **arguments)
        trainer.train()
        losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        assert len(losses) == 3 and losses[2] > min(losses)  # it has something to go back to
        assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)
        assert ("longmoe" in vars(trainer.model)) == patched
        best.append((losses, trainer.state.best_global_step))
    assert best[1][0] == pytest.approx(best[0][0], rel=1e-3)
    assert best[1][1] == best[0][1]
