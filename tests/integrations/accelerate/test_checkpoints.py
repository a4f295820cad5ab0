"""A run that goes on from a checkpoint has the bits of one that was not stopped; from and to a plain AdamW too."""

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from hf_longmoe import ComponentPeakCallback, OffloadStreamAdamW


@pytest.mark.parametrize("update_on", ["accelerator", "both", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_state_and_load_state(run, plugin, same, tmp_path, update_on, dtype):
    whole = run(plugin(update_on=update_on), dtype=dtype)
    losses = whole.steps(2)
    whole.accelerator.save_state(str(tmp_path))
    losses += whole.steps(3)
    resumed = run(plugin(seed=1, update_on=update_on), dtype=dtype)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.at = 2
    assert resumed.steps(3) == losses[2:] and same(resumed.weights(), whole.weights())


def test_from_a_plain_adamw_and_back(run, plugin, same, tmp_path):
    whole = run()
    losses = whole.steps(1)
    whole.accelerator.save_state(str(tmp_path / "plain"))
    losses += whole.steps(3)

    streamed = run(plugin(update_on="cpu"))
    streamed.accelerator.load_state(str(tmp_path / "plain"))
    streamed.at = 1
    assert streamed.steps(1) == losses[1:2]
    streamed.plugin.remove()  # else the saved state has no `fused`, which a plain AdamW reads
    streamed.accelerator.save_state(str(tmp_path / "streamed"))

    plain = run()
    plain.accelerator.load_state(str(tmp_path / "streamed"))
    plain.at = 2
    assert plain.steps(2) == losses[2:] and same(plain.weights(), whole.weights())


def trainer(folder, one, steps=4, **arguments):
    torch.manual_seed(0)
    AcceleratorState._reset_state(reset_partial_state=True)
    options = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    # Of a family whose experts Transformers loads back when a Trainer resumes (mixtral is none).
    config = AutoConfig.for_model("gpt_oss", vocab_size=101, num_hidden_layers=4, num_local_experts=4, **options)
    ids = torch.randint(3, 101, (16, 20)).tolist()
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=steps,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        activation_checkpointing=True,
        **arguments,
    )
    peaks = ComponentPeakCallback(every=1, first=1, output_dir=folder / "peaks")
    made = Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=args,
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        callbacks=[peaks],
    )
    if one is not None:
        one.install(made.accelerator)
    return made, peaks


def losses(made):
    return [log["loss"] for log in made.state.log_history if "loss" in log]


def test_trainer(plugin, same, tmp_path):
    """Losses, peaks, and a checkpoint that a second Trainer resumes from."""
    stock, stock_peaks = trainer(tmp_path / "stock", None, save_strategy="no")
    stock.train()
    made, peaks = trainer(tmp_path / "ours", one := plugin(update_on="accelerator"), save_steps=2)
    made.train()
    assert losses(made) == losses(stock)
    assert same(list(made.model.parameters()), list(stock.model.parameters()))
    assert isinstance(made.optimizer.optimizer, OffloadStreamAdamW) and one._models[0].offload.offloaded == 3
    boundaries = [report.components["boundaries"].peak for report in (peaks.report, stock_peaks.report)]
    assert boundaries[0] == boundaries[1] * 3 / 4  # two, and the first, which the model's own forward holds on to
    assert peaks.report.components["optimizer"].working <= 2 * 16 * 1024

    again, _ = trainer(tmp_path / "again", plugin(seed=1, update_on="accelerator"), save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert losses(again)[-2:] == losses(stock)[-2:]
    assert same(list(again.model.parameters()), list(stock.model.parameters()))
