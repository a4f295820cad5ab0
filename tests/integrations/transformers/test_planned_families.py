"""Predicted component peaks of a dozen families, each with something that the others have not, against real steps."""

import pytest
import torch

from benchmarks.planner import cases

# By family, what it stands for.
DOZEN = {
    "mixtral": "the plain case",
    "deepseek_v3": "latent attention, a dense first layer, shared experts",
    "gpt_oss": "attention sinks, biases of experts, transposed weights",
    "qwen2_moe": "a gated shared expert",
    "deepseek_v32": "an indexer: quadratic in the length",
    "gemma4": "an MLP beside the experts; three depths that are on no line",
    "qwen3_next": "chunks of linear attention, walked along",
    "minimax": "blocks of linear attention, walked along",
    "nemotron_h": "layers of one block each",
    "lfm2_moe": "convolutions",
    "muse_spark": "the total is highest when no component is",
    "zaya": "one expert a token; experts run again in the recompute",
}
pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("way", ["unbounded", "scheduled"])
@pytest.mark.parametrize("checkpointing", ["non-reentrant", "off"])
@pytest.mark.parametrize("family", DOZEN)
def test_within_three_per_cent(family, checkpointing, way):
    (case,) = [case for case in cases(quick=False) if case.name == f"{family}, {checkpointing}, {way}"]
    torch.manual_seed(0)
    rows, told = case.compared()
    assert told["measured_by"] == "a real step"
    assert {"dispatch", "vocab", "parameters", "gradients", "optimizer", "layer", "total"} <= {
        r.component for r in rows
    }
    assert {row.component: row.difference for row in rows if row.difference > 0.03} == {}
