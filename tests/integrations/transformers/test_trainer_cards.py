"""The card beside what `LongMoETrainer` saves: its section on memory, and what it leaves as it was."""

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import TrainingArguments

from hf_longmoe import ComponentPeakCallback, LongMoETrainer, patch_model


@pytest.fixture
def trainer(build, tmp_path):
    args = TrainingArguments(str(tmp_path / "run"), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=1)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    return LongMoETrainer(
        model=build("mixtral", dtype=torch.float32), args=args, train_dataset=rows, callbacks=[ComponentPeakCallback()]
    )


def test_stock_where_there_is_nothing_to_say(trainer, tmp_path):
    trainer.save_model(tmp_path / "saved")
    assert not (tmp_path / "saved" / "README.md").exists()
    trainer.create_model_card()
    assert "Memory" not in (tmp_path / "run" / "README.md").read_text()


def test_a_section_of_its_own_in_a_card_that_is_kept(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.modelcard.hf_api", lambda: pytest.fail("it has asked the Hub"))
    trainer.model.config._name_or_path = "someone/base"
    patch_model(trainer.model)
    folder = tmp_path / "saved"
    trainer.save_model(str(folder))
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "someone/base" and "license" not in card.data.to_dict()
    assert "model.layers.0.mlp.experts: dispatch" in card.text and "and 2 more modules" in card.text
    assert "Peak bytes" not in card.text, "nothing was measured"

    card.data.license, card.text = "mit", f"Mine.\n\n{card.text}\n\nMy end.\n"
    card.save(folder / "README.md")
    trainer.train()
    trainer.save_model(str(folder))
    again = ModelCard.load(folder / "README.md")
    assert again.data.license == "mit" and again.data.tags.count("hf-longmoe") == 1
    assert again.text.lstrip().startswith("Mine.") and again.text.rstrip().endswith("My end.")
    assert again.text.count("## Memory") == 1 and "highest of 1 step and 1 rank (storage probe)" in again.text
    trainer.save_model(str(folder))
    assert ModelCard.load(folder / "README.md").content == again.content, "it grows"
