"""Run by test_peaks.py: a Trainer on two ranks, of which the second has three times the tokens."""

import contextlib
import io
import json
import os

import ranks
import torch
from datasets import Dataset
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from hf_longmoe import ComponentPeakCallback
from hf_longmoe.integrations.transformers import callback
from hf_longmoe.peaks import save_reports


def run(case):
    os.environ["ACCELERATE_USE_CPU"] = "true"
    folder, rank, per_rank, merge = case["folder"], distributed.get_rank(), [], callback.merge_ranks

    def merge_ranks(reports):
        per_rank.append(list(reports))
        return merge(per_rank[-1])

    def collate(rows):
        ids = torch.tensor([row["ids"] for row in rows]).repeat(1, 1 + 2 * rank)
        return {"input_ids": ids, "labels": ids}

    callback.merge_ranks = merge_ranks
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=128)
    options = dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes, **options))
    data = Dataset.from_dict({"ids": torch.randint(0, 128, (16, 32)).tolist()})
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=1,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        gradient_checkpointing=True,
    )
    peaks = ComponentPeakCallback(every=2)
    trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=collate, callbacks=[peaks])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        trainer.train()
    save_reports(f"{folder}/rank{rank}.json", {"merged": peaks.report, "0": per_rank[0][0], "1": per_rank[0][1]})
    with open(f"{folder}/history{rank}.json", "w") as file:
        json.dump([entry for entry in trainer.state.log_history if "peak/total_MiB" in entry or "loss" in entry], file)
    return said.getvalue()


if __name__ == "__main__":
    ranks.main(run)
