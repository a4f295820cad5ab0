"""Checkpoints of a sharded model and the Trainer's options: which are followed, which refused, and in what words."""

import pytest
import torch
from safetensors.torch import save_file

from hf_longmoe.integrations.transformers.export import export

CASES = {kind: {"kind": kind} for kind in ("best", "refused", "args_after")}


@pytest.fixture(scope="module")
def results(launch):
    return launch("checkpoint_options_worker.py", 2, CASES, timeout=200)


@pytest.mark.slow
def test_best_model(results):
    for rank in results:
        found = rank["best"]
        assert found["best"] == 2 and found["loaded"] and found["moved"]
        assert found["left"] == ["checkpoint-2", "checkpoint-6"]
        assert found["args"] == [False, False]


def test_refused(results):
    for rank in results:
        found = rank["refused"]
        assert "resume_from_checkpoint=True: there is no checkpoint in" in found["nothing there"]
        assert (
            found["other batch"].startswith("CheckpointError: ") and "ranks 0, 1: ValueError" in found["other batch"]
        )
        assert "took 4 samples each (2 ranks), these would take 6" in found["other batch"]
        assert "ignore_data_skip=True" in found["other batch"]
        assert found["data skip ignored"] is None
        assert "checkpoint-8 has no longmoe_checkpoint.json" in found["stock checkpoint"]
        assert "save_on_each_node=True" in found["save_on_each_node"]
        assert "export is for one process by itself, and here are 2 ranks" in found["export among ranks"]
        assert "embeddings of 61 rows, tied to its head, which 2 ranks cannot divide" in found["tied"]
        assert found["tied, even"] is None


def test_adapters_are_not_exported(tmp_path):
    (tmp_path / "longmoe_checkpoint.json").write_text("{}")
    names = {"base_model.model.lm_head.weight": torch.zeros(2, 2)}
    save_file(names, tmp_path / "shard-00001-model-00001-of-00001.safetensors")
    with pytest.raises(ValueError, match="PEFT's adapters around it"):
        export(tmp_path, tmp_path / "exported")


def test_arguments_are_put_back(results):
    for rank in results:
        assert rank["args_after"]["error"].startswith("ValueError: You have set `args.eval_strategy`")
        assert rank["args_after"]["args"] == [False, True]
