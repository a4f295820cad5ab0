"""Tiny models of the families that have a row of their own, made from their configs; and Python, started quickly."""

import multiprocessing
import multiprocessing.forkserver
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

_SMALL = dict(
    vocab_size=101,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    use_cache=False,
)
_MLA = dict(
    moe_intermediate_size=12,
    intermediate_size=20,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8,
    num_key_value_heads=4,
)
_FINE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, intermediate_size=20)
MODELS = {
    "mixtral": dict(intermediate_size=12, num_local_experts=6, num_experts_per_tok=2),
    "deepseek_v2": dict(_MLA, topk_method="greedy"),
    "deepseek_v3": _MLA,
    "qwen2_moe": dict(_FINE, shared_expert_intermediate_size=16, mlp_only_layers=[0]),
    "qwen3_moe": dict(_FINE, mlp_only_layers=[0], head_dim=8),
    "gpt_oss": dict(intermediate_size=12, num_local_experts=6, num_experts_per_tok=2, head_dim=8, sliding_window=8),
    "olmoe": dict(num_experts=6, num_experts_per_tok=2, intermediate_size=12),
    "glm4_moe": dict(
        moe_intermediate_size=12,
        intermediate_size=20,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        head_dim=8,
    ),
    "ernie4_5_moe": dict(
        moe_intermediate_size=12,
        intermediate_size=20,
        moe_num_experts=6,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        use_bias=True,
    ),
    "granitemoe": dict(intermediate_size=12, num_local_experts=6, num_experts_per_tok=2, logits_scaling=4.0),
    "llama": dict(intermediate_size=24),
}

# What commands import, and what takes most of the time of a small one.
IMPORTS = [
    "accelerate",
    "datasets",
    "hf_longmoe.integrations.accelerate",
    "hf_longmoe.integrations.transformers",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.trainer",
]


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """
    `python(*command, timeout, cwd=None)` -> as of `subprocess.run([sys.executable, *command])`, where the command is a
    script or `-m` and a module.

    The process is a fork of one that has imported what takes long, and run nothing. One that lasts longer than
    `timeout` seconds is ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        multiprocessing.forkserver.ensure_running()

    def python(*command, timeout, cwd=None):
        command, folder = [str(part) for part in command], tmp_path_factory.mktemp("python")
        files = [folder / "stdout", folder / "stderr"]
        script = str(Path(__file__).parent / "forked_command.py")
        process = context.Process(target=runpy.run_path, args=(script,), kwargs={"run_name": "__main__"})
        with pytest.MonkeyPatch.context() as patch:  # a new process gets both as they are here
            patch.setattr(sys, "argv", [script, str(cwd or Path.cwd()), *map(str, files), *command])
            patch.setattr(sys, "path", ["", *sys.path])
            process.start()
        try:
            process.join(timeout)
        finally:  # also at pytest's own time-out; a launcher ends its workers then
            process.terminate()
            process.join(30)
            process.kill()
            process.join()
        out, err = (file.read_text() if file.exists() else "" for file in files)
        return subprocess.CompletedProcess(command, process.exitcode, out, err)

    return python


@pytest.fixture(params=sorted(MODELS))
def family(request):
    """Every family that has a row of its own, and a dense one."""
    return request.param


@pytest.fixture
def build():
    """`build(family, dtype=torch.float64, **config)`: a tiny model in training mode, weights drawn from seed 0."""

    def build(family, dtype=torch.float64, experts="eager", **overrides):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**_SMALL, **MODELS[family], **overrides})
        model = AutoModelForCausalLM.from_config(config, experts_implementation=experts)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.dim() > 1:  # the default 0.02 makes experts too quiet to test
                    param.normal_(0, 0.5 / param.shape[-1] ** 0.5 if "embed" not in name else 1.0)
        return model.to(dtype).train()

    return build


@pytest.fixture
def batch():
    torch.manual_seed(1)
    input_ids = torch.randint(3, 101, (2, 19))
    labels = input_ids.clone()
    labels[0, :4] = -100
    return {"input_ids": input_ids, "labels": labels, "attention_mask": torch.ones_like(input_ids)}
