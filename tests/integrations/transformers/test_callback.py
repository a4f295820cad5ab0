import json
import logging
import os

import jsonschema
import pytest
import torch
from datasets import Dataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_longmoe import ComponentPeakCallback, DispatchConfig, LongMoEConfig, VocabConfig, patch_model
from hf_longmoe.integrations.transformers import callback as callback_module
from hf_longmoe.peaks import PeakReport, load_reports
from hf_longmoe.peaks.allocator import AllocatorProbe
from hf_longmoe.peaks.schema import PEAKS_SCHEMA
from hf_longmoe.planner import Plan, Prediction

V, S = 256, 64


def mixtral(**options):
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=V)
    sizes |= options
    config = AutoConfig.for_model(
        "mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False, **sizes
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def dataset(rows=24):
    ids = torch.randint(0, V, (rows, S), generator=torch.Generator().manual_seed(0)).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def trainer(folder, callbacks, model=None, cls=Trainer, **arguments):
    arguments = dict(max_steps=6, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True) | arguments
    arguments.setdefault("per_device_train_batch_size", 1)
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, dataloader_pin_memory=False, **arguments)
    model = mixtral() if model is None else model
    return cls(model=model, args=args, train_dataset=dataset(), eval_dataset=dataset(2), callbacks=callbacks)


def peaks_of(run):
    return {entry["step"]: entry for entry in run.state.log_history if "peak/total_MiB" in entry}


def losses_of(run):
    return [(entry["step"], entry["loss"]) for entry in run.state.log_history if "loss" in entry]


def test_peaks_reach_log_history_and_files_and_do_not_disturb_training(tmp_path, capsys):
    bare = trainer(tmp_path / "bare", [])
    bare.train()
    peaks = ComponentPeakCallback(every=2)
    run = trainer(tmp_path / "run", [peaks])
    run.train()
    assert losses_of(run) == losses_of(bare) and len(losses_of(run)) == 6

    logged = peaks_of(run)
    assert sorted(logged) == [3, 5]
    report = peaks.report
    assert (report.steps, report.ranks, report.probe) == (2, 1, "storage")
    for name in ("dispatch", "vocab", "layer", "parameters", "gradients", "optimizer"):
        highest = max(entry[f"peak/{name}_MiB"] for entry in logged.values())
        assert highest == round(report.components[name].peak / 2**20, 3) > 0
    assert sum(part.at_peak for part in report.components.values()) == report.total
    model_bytes = sum(p.nbytes for p in run.model.parameters())
    assert report.components["gradients"].peak == model_bytes
    assert report.components["vocab"].peak >= 2 * S * V * 4

    assert load_reports(tmp_path / "run/peaks.json") == {"this run": report}
    jsonschema.validate(json.loads((tmp_path / "run/peaks.json").read_text()), PEAKS_SCHEMA)
    assert (tmp_path / "run/peaks.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "Peak bytes, this run (highest of 2 steps)" in printed and "| dispatch" in printed
    assert _get_current_dispatch_mode() is None and "_run_epoch" not in vars(run)


def test_peaks_reach_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    peaks = ComponentPeakCallback(every=1, first=2)
    run = trainer(tmp_path, [peaks], report_to="tensorboard", max_steps=3)
    run.train()
    events = [os.path.join(root, f) for root, _, files in os.walk(tmp_path) for f in files if "tfevents" in f]
    (file,) = events
    accumulator = EventAccumulator(file).Reload()
    for name, entry in [("total", "peak/total_MiB"), ("dispatch", "peak/dispatch_MiB")]:
        scalars = accumulator.Scalars(f"train/peak/{name}_MiB")
        expected = [(step, pytest.approx(logged[entry])) for step, logged in peaks_of(run).items()]
        assert [(s.step, s.value) for s in scalars] == expected and len(scalars) == 2


def test_accumulation_is_one_step_and_evaluation_is_none(tmp_path):
    peaks = ComponentPeakCallback(every=1)
    run = trainer(
        tmp_path,
        [peaks],
        max_steps=5,
        gradient_accumulation_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
    )
    run.train()
    assert sorted(peaks_of(run)) == [3, 4, 5]
    assert len([entry for entry in run.state.log_history if "eval_loss" in entry]) == 6
    gradients = peaks.report.components["gradients"]
    model_bytes = sum(p.nbytes for p in run.model.parameters())
    # Those of earlier micro-batches, and a later one's before they are added; at the end of a step they are dropped.
    assert model_bytes < gradients.peak <= 2 * model_bytes and gradients.phases["resident"] == 0
    # An evaluation forms the logits of its batch of 8 rows: in no step that was measured.
    assert peaks.report.components["vocab"].peak < 5 * S * V * 4


def test_a_resumed_run_measures_from_where_it_starts(tmp_path):
    first = trainer(tmp_path, [ComponentPeakCallback(every=1)], max_steps=6, save_strategy="steps", save_steps=3)
    first.train()
    peaks = ComponentPeakCallback(every=1, first=1)
    run = trainer(tmp_path, [peaks], max_steps=6)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert sorted(peaks_of(run)) == [3, 4, 5, 6]  # the third from the checkpoint's own history
    moments = 2 * sum(p.nbytes for p in run.model.parameters())
    assert peaks.report.steps == 3
    assert peaks.report.components["optimizer"].phases["resident"] >= moments  # loaded before its first step


def test_a_run_shorter_than_the_first_step_measures_its_last(tmp_path):
    peaks = ComponentPeakCallback(every=10, first=50)
    run = trainer(tmp_path, [peaks], max_steps=2)
    run.train()
    assert sorted(peaks_of(run)) == [2] and peaks.report.steps == 1


class Raises(TrainerCallback):
    def __init__(self, event, step):
        self.step = step
        setattr(self, event, self.stop)

    def stop(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise RuntimeError("stop")


@pytest.mark.parametrize("event", ["on_optimizer_step", "on_step_begin", "on_step_end", "on_epoch_begin"])
def test_an_exception_in_training_leaves_nothing_installed(tmp_path, event):
    peaks = ComponentPeakCallback(every=1, first=1)
    run = trainer(tmp_path, [peaks, Raises(event, 0 if event != "on_step_end" else 1)])
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in run.model.modules()]
    with pytest.raises(RuntimeError, match="stop"):
        run.train()
    assert _get_current_dispatch_mode() is None and "resize_" not in vars(torch.UntypedStorage)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in run.model.modules()] == hooks
    assert "_loss_function" not in vars(run.model)
    # And the same callback and Trainer can go again.
    run.callback_handler.callbacks = [c for c in run.callback_handler.callbacks if not isinstance(c, Raises)]
    run.train()
    assert peaks.report.steps == 6 and "_run_epoch" not in vars(run)


def test_an_error_in_the_model_leaves_nothing_installed(tmp_path):
    class Broken(Trainer):
        def training_step(self, model, *args, **kwargs):
            super().training_step(model, *args, **kwargs)
            raise MemoryError("no more")

    run = trainer(tmp_path, [ComponentPeakCallback(every=1, first=1)], cls=Broken)
    with pytest.raises(MemoryError):
        run.train()
    assert _get_current_dispatch_mode() is None and "_loss_function" not in vars(run.model)


def test_an_epoch_that_stops_within_a_step_closes_the_probe(tmp_path):
    class Stops(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    peaks = ComponentPeakCallback(every=1)
    run = trainer(tmp_path, [peaks, Stops()], gradient_accumulation_steps=2)
    run.train()
    assert sorted(peaks_of(run)) == [3] and _get_current_dispatch_mode() is None
    assert load_reports(tmp_path / "peaks.json")["this run"].steps == 1


def test_logging_keeps_the_flags_of_the_step_and_other_callbacks_decisions(tmp_path):
    class Decides(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "peak/total_MiB" in logs and state.global_step == 4:
                control.should_training_stop = True

    run = trainer(tmp_path, [ComponentPeakCallback(every=1), Decides()], logging_steps=2)
    run.train()
    assert [step for step, _ in losses_of(run)] == [2, 4] and run.state.global_step == 4


def test_a_subclass_that_changes_log_is_used(tmp_path):
    class Renames(Trainer):
        def log(self, logs, *args, **kwargs):
            super().log({f"my/{name}": value for name, value in logs.items()}, *args, **kwargs)

    run = trainer(tmp_path, [ComponentPeakCallback(every=3)], cls=Renames)
    run.train()
    assert [entry["step"] for entry in run.state.log_history if "my/peak/total_MiB" in entry] == [3, 6]


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_caps_of_a_patched_model(tmp_path, capsys, warnings):
    config = LongMoEConfig(dispatch=DispatchConfig(budget="64KiB"), vocab=VocabConfig(budget="32KiB"))
    peaks = ComponentPeakCallback(every=1, output_dir=tmp_path / "elsewhere")
    run = trainer(tmp_path, [peaks], model=patch_model(mixtral(), config))
    run.train()
    assert not [text for text in warnings() if "cap" in text]
    assert 0 < peaks.report.components["vocab"].working <= 32 << 10
    assert 0 < peaks.report.components["dispatch"].working <= (64 << 10) + 24 * 2 * S
    printed = capsys.readouterr().out
    # The cap counts all but 24 bytes a row and 16 a token.
    allowed = {"dispatch": (64 << 10) + 24 * 2 * S, "vocab": (32 << 10) + 16 * S}
    nearest = max(allowed, key=lambda name: peaks.report.components[name].working / allowed[name])
    assert f"Nearest its cap: {nearest}, " in printed and "| 64 KiB" in printed
    assert (tmp_path / "elsewhere/peaks.json").exists() and not (tmp_path / "peaks.json").exists()


def test_a_component_that_passes_its_cap_is_named_once(tmp_path, warnings):
    model = patch_model(mixtral(), LongMoEConfig(vocab=VocabConfig(budget="32KiB"), dispatch=None))
    # What a wrong schedule would do: the stock loss, whatever the cap.
    del model._loss_function, model.lm_head.forward
    run = trainer(tmp_path, [ComponentPeakCallback(every=1)], model=model)
    model.longmoe.head = None
    run.train()
    (text,) = [text for text in warnings() if "cap" in text]
    assert text.startswith("vocab has passed its cap: ") and "vocab.budget is 32 KiB (step 3)" in text


HALVES = ["bf16", "bf16, tied", "autocast"]


def half_run(folder, half):
    """A hidden size at which one rounded dh, or the cast weight, is more than the budget."""
    model = mixtral(hidden_size=128, tie_word_embeddings=half == "bf16, tied")
    model = model if half == "autocast" else model.bfloat16()
    patch_model(model, LongMoEConfig(vocab=VocabConfig(budget="32KiB"), dispatch=None))
    arguments = dict(max_steps=3, per_device_train_batch_size=4, bf16=half == "autocast")
    peaks = ComponentPeakCallback(every=1)
    return trainer(folder, [peaks], model=model, **arguments), peaks


@pytest.mark.parametrize("half", HALVES)
def test_half_precision_within_its_cap_is_no_warning(tmp_path, warnings, half):
    run, peaks = half_run(tmp_path, half)
    run.train()
    assert peaks.report.components["vocab"].working > (32 << 10) + 16 * 4 * S  # so what is left aside matters
    assert not [text for text in warnings() if "cap" in text]


@pytest.mark.parametrize("half", HALVES)
def test_half_precision_that_passes_its_cap_is_a_warning(tmp_path, warnings, half):
    run, _ = half_run(tmp_path, half)
    del run.model._loss_function, run.model.lm_head.forward
    run.model.longmoe.head = None
    run.train()
    (text,) = [text for text in warnings() if "cap" in text]
    assert text.startswith("vocab has passed its cap: ")


def test_a_missing_matplotlib_is_one_line(tmp_path, monkeypatch, warnings):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    trainer(tmp_path, [ComponentPeakCallback(every=1)], max_steps=1).train()
    (text,) = [text for text in warnings() if "peaks.png" in text]
    assert text == "peaks.png is not written. Plots need matplotlib: pip install 'hf-longmoe[plot]'."
    assert (tmp_path / "peaks.json").exists() and not (tmp_path / "peaks.png").exists()


@pytest.mark.parametrize(("name", "value"), [("every", 0), ("first", -1), ("every", "10"), ("first", 1.5)])
def test_bad_arguments(name, value):
    with pytest.raises(ValueError, match=f"{name}=.* must be a whole number of steps, 1 or more"):
        ComponentPeakCallback(**{name: value})


def prediction(report, **off):
    """What was measured, but for the factors `off`."""
    sizes = {name: round(part.peak * off.get(name, 1)) for name, part in report.components.items()}
    return Prediction(components=sizes, total=report.total, at_peak=sizes, phase="backward", at_work="vocab")


@pytest.mark.parametrize("patched", [True, False])
def test_peaks_beside_their_predictions(tmp_path, capsys, patched):
    """Of a patched model those of the scheduled step, else of the unbounded."""
    model, caps = mixtral(), LongMoEConfig(dispatch=DispatchConfig(budget="1MiB"), vocab=VocabConfig(budget="1MiB"))
    model = patch_model(model, caps) if patched else model
    first = ComponentPeakCallback()
    trainer(tmp_path / "first", [first], model=model).train()
    right, wrong = prediction(first.report), prediction(first.report, vocab=2, parameters=0.5)
    sides = {"scheduled": wrong, "unbounded": right} if patched else {"scheduled": right, "unbounded": wrong}
    for swap, told in (
        (False, "Off its prediction by more than 10%: vocab below, parameters above."),
        (True, "Every component is within 10% of its prediction."),
    ):
        names = reversed(sides) if swap else sides
        both = dict(zip(names, sides.values(), strict=True))
        planned = Plan(
            shape=None, layout=None, config=caps, limit=None, at_most=0, planner=None,
            longest_unbounded=None, longest_scheduled=None, **both,
        )  # fmt: skip
        capsys.readouterr()
        trainer(tmp_path / "second", [ComponentPeakCallback(plan=planned)], model=model).train()
        printed = capsys.readouterr().out
        assert told in printed and "Predicted, and measured in this run" in printed


def test_a_plan_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"plan='mixtral' must be a Plan, as hf_longmoe\.plan returns it"):
        ComponentPeakCallback(plan="mixtral")


def test_outside_of_a_trainer_it_says_so_and_does_nothing(warnings, tmp_path):
    peaks = ComponentPeakCallback()
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    run = trainer(tmp_path, [])
    state, control = run.state, run.control
    state.max_steps = 3
    for event in ("on_train_begin", "on_epoch_begin", "on_step_begin", "on_step_end", "on_train_end"):
        getattr(peaks, event)(args, state, control)
    (text,) = [text for text in warnings() if "nothing is measured" in text]
    assert peaks.report is None


class ScriptedProbe(AllocatorProbe):
    """Stands for an accelerator: 1 MiB higher in each step."""

    opened = 0

    def __init__(self, device):
        class Memory:
            level = 0

            def read(self):
                return self.level, self.level

            def reset_peak(self):
                pass

        super().__init__(Memory(), device)

    def __exit__(self, *error):
        type(self).opened += 1
        self._memory.level = type(self).opened << 20
        super().__exit__(*error)


def test_on_an_accelerator_every_step_is_measured_and_one_in_so_many_logged(tmp_path, monkeypatch):
    monkeypatch.setattr(callback_module, "AllocatorProbe", ScriptedProbe)
    monkeypatch.setattr(callback_module, "has_allocator", lambda device: True)
    monkeypatch.setattr(ScriptedProbe, "opened", 0)
    peaks = ComponentPeakCallback(every=2)
    run = trainer(tmp_path, [peaks])
    run.train()
    # Steps 1 to 3, then 4 and 5, then 6 at the end.
    assert {step: entry["peak/total_MiB"] for step, entry in peaks_of(run).items()} == {3: 3.0, 5: 5.0}
    assert isinstance(peaks.report, PeakReport) and peaks.report.probe == "allocator"
    assert (peaks.report.steps, peaks.report.total) == (6, 6 << 20)
