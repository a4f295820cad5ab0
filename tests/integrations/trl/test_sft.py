"""`LongMoESFTTrainer` on a patched model: what `SFTTrainer` logs without the patch, loss, entropy and accuracy."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from hf_longmoe import ComponentPeakCallback, DispatchConfig, LongMoEConfig, VocabConfig, patch_model, unpatch_model
from hf_longmoe.integrations.trl import LongMoESFTTrainer, bound_head

LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
CASES = {
    "completion only": {},
    "packing": dict(packing=True, max_length=32),
    "dft": dict(
        loss_type="dft", gradient_accumulation_steps=2, completion_only_loss=False, gradient_checkpointing=False
    ),
    "LoRA": {},
}


@pytest.fixture
def sft(build_small, tiny, rows, tokenizer, given):
    """`sft(patched, peft=None, family="mixtral", **arguments)`: a trainer, with the patch and ours, or TRL's own."""

    def sft(patched, peft=False, family="mixtral", callbacks=None, dataset=None, config=tiny, build=None, **arguments):
        model = build_small(family, **build or {})
        if patched:
            patch_model(model, config)
        return (LongMoESFTTrainer if patched else SFTTrainer)(
            model=model,
            args=SFTConfig(**given(**arguments)),
            train_dataset=rows("completion") if dataset is None else dataset,
            eval_dataset=rows("completion").select(range(4)),
            processing_class=tokenizer,
            peft_config=LoraConfig(**LORA) if peft else None,
            callbacks=callbacks,
        )

    return sft


@pytest.mark.parametrize("name", CASES)
def test_what_the_stock_trainer_logs(sft, logged, assert_same_logs, name):
    trainers = [sft(patched, peft=name == "LoRA", **CASES[name]) for patched in (False, True)]
    want, got = map(logged, trainers)
    assert {"entropy", "mean_token_accuracy", "aux_loss", "num_tokens"} <= want[0].keys()
    assert_same_logs(got, want)
    report = trainers[1].accelerator.unwrap_model(trainers[1].model).longmoe
    assert all(entry.schedule is not None for entry in report.entries), report
    stock, ours = (dict(trainer.model.named_parameters()) for trainer in trainers)
    for key, value in stock.items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-4 * value.abs().max().item(), msg=key)
    moved = [key for key, value in stock.items() if value.requires_grad]
    assert any("lora" in key for key in moved) == (name == "LoRA")


def test_evaluation_and_what_a_later_unpatching_leaves(sft):
    trainers = [sft(patched) for patched in (False, True)]
    want, got = (trainer.evaluate() for trainer in trainers)
    assert 0 < want["eval_entropy"] and {"eval_loss", "eval_mean_token_accuracy"} <= want.keys()
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_aux_loss"):
        assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-7), name
    unpatch_model(trainers[1].model)  # then TRL's own head answers
    again = trainers[1].evaluate()
    assert again["eval_loss"] == want["eval_loss"] and again["eval_entropy"] == want["eval_entropy"]


@pytest.mark.parametrize("peft", [False, True])
def test_peaks_are_lower(sft, tokenizer, peft):
    """A real proportion of vocabulary to hidden size; TRL's own tile is 4,096 tokens by 32,768 entries."""
    ids = torch.randint(3, 32768, (4, 48), generator=torch.Generator().manual_seed(0)).tolist()
    config = LongMoEConfig(dispatch=DispatchConfig(budget="64KiB"), vocab=VocabConfig(budget="2MiB"))
    totals, logs = [], []
    for patched in (False, True):
        callback = ComponentPeakCallback(every=1, first=2)
        arguments = dict(callbacks=[callback], dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}))
        trainer = sft(patched, peft, config=config, build=dict(vocab_size=32768), **arguments)
        trainer.train()
        logs.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        if patched:  # peaks are logged beside what a step logs, and take nothing from it
            assert all("entropy" in log for log in trainer.state.log_history if "loss" in log)
            assert [
                set(log) & {"entropy", "loss"} for log in trainer.state.log_history if "peak/vocab_MiB" in log
            ] == [set()]
        peaks = callback.report.components
        totals.append(callback.report.total - peaks["parameters"].peak - peaks["gradients"].peak)
    assert len(logs[0]) == 2 and logs[1] == pytest.approx(logs[0], rel=1e-5)
    assert peaks["vocab"].working <= 2 << 20 and peaks["dispatch"].working <= 64 << 10
    assert totals[1] < 0.1 * totals[0]


def test_a_stock_trainer_is_refused_or_keeps_its_own_head(build_small, tiny, rows, tokenizer, given, logged):
    """TRL replaces the forward of a model that was patched before; one that is patched after keeps TRL's own tiles."""
    arguments = dict(args=SFTConfig(**given()), train_dataset=rows("completion"), processing_class=tokenizer)
    trainer = SFTTrainer(model=patch_model(build_small(), tiny), **arguments)
    with pytest.raises(RuntimeError, match="forward of MixtralForCausalLM was replaced.*use LongMoESFTTrainer"):
        trainer.train()
    trainer = SFTTrainer(model=build_small(), **arguments)
    with pytest.raises(ValueError, match="SFTTrainer: its model is not patched; call patch_model"):
        bound_head(trainer)
    patch_model(trainer.model, tiny)
    own = logged(trainer)
    entries = {entry.component: entry for entry in trainer.model.longmoe.entries}
    assert entries["vocab"].schedule is None and entries["dispatch"].schedule is not None
    assert "computes its loss without calling its LM head" in entries["vocab"].note

    trainer = SFTTrainer(model=build_small(), **arguments)
    patch_model(trainer.model, tiny)
    bound_head(trainer)
    bound_head(trainer)
    assert [log["loss"] for log in logged(trainer)] == pytest.approx([log["loss"] for log in own], rel=1e-5)
    assert all(entry.schedule is not None for entry in trainer.model.longmoe.entries)


def test_refused(sft, tiny):
    with pytest.raises(
        ValueError, match="vocab.z_loss=0.1 cannot be applied: this trainer makes its loss of log-prob"
    ):
        sft(True, config=LongMoEConfig(vocab=VocabConfig(z_loss=0.1))).train()
    trainer = sft(True)
    trainer.accelerator.state.parallelism_config = type("Config", (), {"cp_size": 2})()
    try:
        with pytest.raises(ValueError, match="cp_size=2.* is not supported.*set cp_size to 1"):
            bound_head(trainer)
    finally:
        trainer.accelerator.state.parallelism_config = None


def test_without_the_vocabulary_schedule_TRL_s_own_head_answers(sft, logged, assert_same_logs):
    config = LongMoEConfig(dispatch=DispatchConfig(budget="16KiB"), vocab=None)
    assert_same_logs(logged(sft(True, config=config)), logged(sft(False)))
