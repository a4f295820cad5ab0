"""Two processes under `accelerate launch`: the peaks are the maximum over ranks, on every rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_longmoe.peaks import load_reports
from hf_longmoe.peaks.region import COMPONENTS

ROOT = Path(__file__).parents[2]
TRAIN = """
import json, os, sys
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from hf_longmoe import ComponentPeakCallback
from hf_longmoe.integrations.transformers import callback
from hf_longmoe.peaks import save_reports

folder, rank = sys.argv[1], int(os.environ["RANK"])
per_rank, merge = [], callback.merge_ranks
def merge_ranks(reports):
    per_rank.append(list(reports))
    return merge(per_rank[-1])
callback.merge_ranks = merge_ranks

config = AutoConfig.for_model("mixtral", hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=128)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config)
def collate(rows):  # rank 1 has three times the tokens
    ids = torch.tensor([row["ids"] for row in rows]).repeat(1, 1 + 2 * rank)
    return {"input_ids": ids, "labels": ids}
data = Dataset.from_dict({"ids": torch.randint(0, 128, (16, 32)).tolist()})
args = TrainingArguments(output_dir=folder, use_cpu=True, per_device_train_batch_size=1, max_steps=4, logging_steps=1,
    save_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False, dataloader_pin_memory=False,
    gradient_checkpointing=True)
peaks = ComponentPeakCallback(every=2)
trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=collate, callbacks=[peaks])
trainer.train()
save_reports(f"{folder}/rank{rank}.json", {"merged": peaks.report, "0": per_rank[0][0], "1": per_rank[0][1]})
with open(f"{folder}/history{rank}.json", "w") as file:
    json.dump([entry for entry in trainer.state.log_history if "peak/total_MiB" in entry or "loss" in entry], file)
"""


@pytest.mark.timeout(270)
def test_peaks_are_the_maximum_over_ranks(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    config = str(ROOT / "accelerate_configs/cpu_2proc.yaml")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [*launch, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr[-3000:]

    zero, one = load_reports(tmp_path / "rank0.json"), load_reports(tmp_path / "rank1.json")
    assert zero == one
    merged, ranks = zero["merged"], [zero["0"], zero["1"]]
    assert (merged.ranks, merged.steps) == (2, 1)
    assert merged.total == ranks[1].total > ranks[0].total
    for name in COMPONENTS:
        assert merged.components[name].peak == max(rank.components[name].peak for rank in ranks)
        assert merged.components[name].at_peak == ranks[1].components[name].at_peak
    for name, times in [("boundaries", 3), ("parameters", 1), ("gradients", 1)]:
        assert ranks[1].components[name].peak == times * ranks[0].components[name].peak > 0
    # The vocabulary's grow with the tokens too, the loss itself aside.
    assert 2.9 < ranks[1].components["vocab"].peak / ranks[0].components["vocab"].peak < 3

    history = [json.loads((tmp_path / f"history{rank}.json").read_text()) for rank in (0, 1)]
    assert [entry.get("peak/total_MiB") for entry in history[0]] == [
        entry.get("peak/total_MiB") for entry in history[1]
    ]
    assert [entry["step"] for entry in history[0] if "peak/total_MiB" in entry] == [3]
    assert load_reports(tmp_path / "peaks.json") == {"this run": merged}
    assert run.stdout.count("Peak bytes, this run (highest of 1 step and 2 ranks)") == 1
