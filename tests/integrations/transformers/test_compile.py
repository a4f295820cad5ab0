"""`torch_compile=True`: the schedules run as they are, the rest of the model is compiled."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_longmoe import patch_model


@pytest.mark.slow
def test_trainer_with_checkpointing(build, tiny, batch, tmp_path):
    """Through everything but code generation, which takes a compiler and minutes."""
    rows = [{k: v[i] for k, v in batch.items()} for i in range(2)]
    curves = []
    for compiled in (False, True):
        model = build("mixtral", dtype=torch.float32, num_hidden_layers=1)
        options = {}
        if compiled:
            patch_model(model, tiny)
            options = dict(torch_compile=True, torch_compile_backend="aot_eager", gradient_checkpointing=True)
        args = TrainingArguments(
            str(tmp_path),
            max_steps=2,
            optim="sgd",
            learning_rate=0.3,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            **options,
        )
        trainer = Trainer(model=model, args=args, train_dataset=rows)
        trainer.train()
        curves.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        assert not compiled or all(entry.schedule is not None for entry in model.longmoe.entries)
    torch._dynamo.reset()
    assert curves[1] == pytest.approx(curves[0], rel=1e-5) and curves[0][0] != curves[0][1]
