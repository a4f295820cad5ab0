"""What a user tries first: what cannot run beside the schedules is refused in one line, before anything is trained."""

import re
from importlib import metadata
from types import MethodType

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, ParallelismConfig
from peft import LoraConfig, get_peft_model
from torch import distributed, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput

from hf_longmoe import LongMoEConfig, patch_model, unpatch_model


def refused(match, call, *args, kind=ValueError, **kwargs):
    with pytest.raises(kind, match=match) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)


def trainer_of(model, batch, folder, **arguments):
    args = TrainingArguments(
        str(folder), max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", **arguments
    )
    rows = [{k: v[i] for k, v in batch.items()} for i in range(2)]
    return Trainer(model=model, args=args, train_dataset=rows)


# -- Liger -----------------------------------------------------------------------------------------------------------
def fused_forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
    """As Liger's: the loss from hidden states and the head's weight, the head never called."""
    hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
    logits = F.linear(hidden, self.lm_head.weight)
    return CausalLMOutput(loss=F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


def fused_experts(self, hidden_states, top_k_index, top_k_weights):
    return type(self).forward(self, hidden_states, top_k_index, top_k_weights)


def like_liger(model, kernel_config):
    """What `apply_liger_kernel` does to an instance, inside `train()`."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = kernel_config or {}
    if config.get("fused_linear_cross_entropy", True):
        model.forward = MethodType(fused_forward, model)
    if config.get("swiglu", True):
        for layer in model.model.layers:
            vars(layer.mlp.experts)["forward"] = MethodType(fused_experts, layer.mlp.experts)


@pytest.mark.parametrize("peft", [False, True])
@pytest.mark.parametrize(
    ("kernel_config", "what"),
    [
        (None, "MixtralForCausalLM"),
        ({"swiglu": False}, "MixtralForCausalLM"),
        ({"fused_linear_cross_entropy": False}, r"model\.layers\.0\.mlp\.experts"),
    ],
)
def test_liger_in_the_trainer(build, tiny, batch, tmp_path, monkeypatch, peft, kernel_config, what):
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", like_liger)
    model = patch_model(build("mixtral", dtype=torch.float32), tiny)
    if peft:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    before = {name: param.clone() for name, param in model.named_parameters()}
    trainer = trainer_of(model, batch, tmp_path, use_liger_kernel=True, liger_kernel_config=kernel_config)
    message = rf"^The forward of {what} was replaced after patch_model \(use_liger_kernel=True"
    refused(message, trainer.train, kind=RuntimeError)
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


def test_liger_that_touches_neither_experts_nor_forward_is_welcome(build, tiny, batch, tmp_path, monkeypatch):
    """Its norms and rotary kernels, say."""
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", like_liger)
    config = {"fused_linear_cross_entropy": False, "swiglu": False}
    model = patch_model(build("mixtral", dtype=torch.float32), tiny)
    trainer_of(model, batch, tmp_path, use_liger_kernel=True, liger_kernel_config=config).train()


def test_liger_before_the_patch(build, batch, monkeypatch, gradients, assert_same):
    monkeypatch.setattr(fused_forward, "__module__", "liger_kernel.transformers.model.mixtral")
    model = build("mixtral")
    want = gradients(model, fused_forward(model, **batch).loss)
    like_liger(model, {"swiglu": False})
    refused(r"patch_model: Liger has replaced the forward of MixtralForCausalLM.*vocab=None", patch_model, model)
    patch_model(model, LongMoEConfig(vocab=None))  # the way out: its loss, our experts
    assert_same(gradients(model, model(**batch).loss), want)
    unpatch_model(model)
    assert model.forward.__func__ is fused_forward


def test_liger_that_is_not_installed_is_the_trainers_own_error(build, batch, tmp_path):
    model = patch_model(build("mixtral", dtype=torch.float32))
    refused("liger", trainer_of(model, batch, tmp_path, use_liger_kernel=True).train, kind=ImportError)


def test_unpatching_leaves_what_others_have_put_there(build, tiny, batch):
    model = patch_model(build("mixtral", dtype=torch.float32), tiny)
    like_liger(model, {"swiglu": False})
    assert unpatch_model(model).forward.__func__ is fused_forward


def test_the_wrapper_of_accelerate_is_kept(build, tiny, batch):
    """Mixed precision is a wrapper on the instance's `forward`: it may come before the patch, or after, and stays."""
    losses, exact = {}, build("mixtral", dtype=torch.float32)(**batch).loss.item()
    for order in ("stock", "patch, prepare", "prepare, patch"):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = build("mixtral", dtype=torch.float32, experts="grouped_mm")
        if order == "patch, prepare":
            patch_model(model, tiny)
        model = accelerator.prepare(model)
        if order == "prepare, patch":
            patch_model(model, tiny)
        losses[order] = model(**batch).loss.item()
        if order != "stock":
            assert all(entry.schedule is not None for entry in model.longmoe.entries)
            for again in range(2):
                assert unpatch_model(model)(**batch).loss.item() == losses["stock"], (order, again)
                assert patch_model(model, tiny)(**batch).loss.item() == losses[order], (order, again)
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # takes its wrapper off, and not the patch
        output = model(**batch)
        assert (order == "stock") == (type(output.logits) is torch.Tensor)
        if order != "prepare, patch":
            assert output.loss.item() == pytest.approx(exact, rel=1e-6)
        if order != "stock":
            assert type(unpatch_model(model)(**batch).logits) is torch.Tensor
    AcceleratorState._reset_state(True)
    assert len({round(loss, 2) for loss in losses.values()}) == 1
    assert all(abs(loss - exact) > 1e-5 for loss in losses.values())


# -- launches --------------------------------------------------------------------------------------------------------
ENVIRONMENTS = {
    "DeepSpeed": (dict(ACCELERATE_USE_DEEPSPEED="true"), "does not run under DeepSpeed; launch with DDP or FSDP2"),
    "Megatron-LM": (dict(ACCELERATE_USE_MEGATRON_LM="true"), "does not run under Megatron-LM"),
    "FSDP1": (dict(ACCELERATE_USE_FSDP="true", FSDP_VERSION="1"), r"FSDP1 flattens parameters; use FSDP2"),
    "FSDP of no version": (dict(ACCELERATE_USE_FSDP="true"), r"use FSDP2 \(fsdp_version: 2"),
    "sp_size": (dict(PARALLELISM_CONFIG_SP_SIZE="4"), "asks for sp_size=4"),
    "tp_size": (dict(PARALLELISM_CONFIG_TP_SIZE="2"), "asks for tp_size=2"),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_launch_that_is_refused(build, tiny, batch, monkeypatch, name):
    variables, message = ENVIRONMENTS[name]
    early, late = build("mixtral"), build("mixtral")
    patch_model(late, tiny)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    refused(message, patch_model, early, tiny)
    assert "longmoe" not in vars(early)
    refused(message, late, **batch)  # patched before there was a launch: in its first training step
    late.eval()(**batch)


def test_fsdp2_is_not(build, tiny, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    patch_model(build("mixtral"), tiny)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (dict(parallelism_config=ParallelismConfig(tp_size=4)), "tp_size=4"),
        (dict(parallelism_config=ParallelismConfig(sp_size=2)), "sp_size=2"),
        (dict(distributed_type=DistributedType.DEEPSPEED), "DeepSpeed"),
        (dict(distributed_type=DistributedType.MEGATRON_LM), "Megatron-LM"),
    ],
)
def test_an_accelerator_made_in_python_is_read_too(build, tiny, batch, monkeypatch, state, message):
    model = patch_model(build("mixtral"), tiny)
    for name, value in state.items():
        monkeypatch.setitem(AcceleratorState._shared_state, name, value)
    refused(message, model, **batch)
    refused(message, patch_model, build("mixtral"), tiny)
    refused(message, patch_model, model, LongMoEConfig())
    assert model.longmoe.config == tiny  # still as it was


def test_context_parallelism_that_nobody_brings_about(build, tiny, batch, monkeypatch):
    """Without the plugin each rank would compute whole sequences, and count them `cp_size` times."""
    model = patch_model(build("mixtral"), tiny)
    message = r"asks for cp_size=2 \(ParallelismConfig\).*LongMoEPlugin\(config\).install.*or set cp_size to 1"
    with monkeypatch.context() as of_the_launch:
        of_the_launch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
        refused(message, model, **batch)
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", ParallelismConfig(cp_size=2))
    refused(message, model, **batch)
    patch_model(build("mixtral"), tiny)  # before there is a plugin


def test_context_parallelism_without_ringmaster(build, tiny, monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    refused(
        r"axolotl-ringmaster>=0\.2\.7.*pip install hf-longmoe\[cp\]", patch_model, build("mixtral"), kind=ImportError
    )
    monkeypatch.setattr(metadata, "version", lambda name: "0.2.6")
    refused(r"which is 0\.2\.6: pip install hf-longmoe\[cp\]", patch_model, build("mixtral"), kind=ImportError)


def test_a_parallelism_config_of_sizes_1_is_not_refused(build, tiny, batch, monkeypatch):
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", ParallelismConfig(dp_shard_size=2))
    patch_model(build("mixtral"), tiny)(**batch)


def test_a_model_in_fsdp1(build, tiny):
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.warns():
            wrapped = distributed.fsdp.FullyShardedDataParallel(
                build("mixtral", dtype=torch.float32), device_id=torch.device("cpu")
            )
        refused("FSDP1 flattens parameters; use FSDP2", patch_model, wrapped, tiny)
    finally:
        distributed.destroy_process_group()


def test_a_replica(build, tiny, batch):
    """What `nn.DataParallel` runs: a shallow copy, whose patched methods would be the original's."""
    model = patch_model(build("mixtral"), tiny)
    refused("cannot run as a replica.*accelerate launch", model._replicate_for_data_parallel(), **batch)


def test_device_map(build, tiny, tmp_path):
    build("mixtral", dtype=torch.float32).save_pretrained(tmp_path)
    spread = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map={**spread, "lm_head": "disk"}, offload_folder=str(tmp_path / "offload")
    )
    refused(
        r"""spread over \['cpu', 'disk'\] by device_map="auto"; load it without device_map""", patch_model, model, tiny
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")  # one device: nothing is spread
    patch_model(model, tiny)
    assert all(entry.schedule is not None for entry in model.longmoe.entries)


# -- weights that are not plain --------------------------------------------------------------------------------------
class QuantisedLinear(nn.Module):
    """As many libraries have them: weights in buffers."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("qweight", linear.weight.to(torch.int8))
        self.register_buffer("scale", torch.tensor(0.5, dtype=linear.weight.dtype))

    def forward(self, x):
        return F.linear(x, self.qweight.to(x.dtype) * self.scale)


def eight_bit(model):
    for layer in model.model.layers[1:]:
        experts = layer.mlp.experts
        experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.to(torch.int8), requires_grad=False)
    return r"its weights are quantised \(gate_up_proj is torch\.int8\); load it in bf16"


def float8(model):
    for layer in model.model.layers[1:]:
        experts = layer.mlp.experts
        experts.down_proj = nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    return r"its weights are quantised \(down_proj is torch\.float8_e4m3fn\)"


def subclass(model):
    """As torchao has them: a tensor that says it is bf16."""
    for layer in model.model.layers[1:]:
        experts = layer.mlp.experts
        experts.down_proj = nn.Parameter(TwoTensor(experts.down_proj.detach(), experts.down_proj.detach()))
    return r"its weights are quantised \(down_proj is a TwoTensor\)"


@pytest.mark.parametrize("kind", [eight_bit, float8, subclass])
def test_quantised_experts_are_left_alone(build, tiny, kind):
    model = build("deepseek_v3")
    message = kind(model)
    patch_model(model, tiny)
    left = {entry.module: entry.note for entry in model.longmoe.entries if entry.schedule is None}
    assert sorted(left) == ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    assert all(re.match(message, note) for note in left.values())
    patched = {entry.module for entry in model.longmoe.entries if entry.schedule is not None}
    assert {"lm_head", "model.layers.0.mlp", "model.layers.1.mlp.shared_experts"} <= patched


def test_quantised_linear_layers_are_left_alone(build, tiny, batch):
    model = build("deepseek_v3")
    shared = model.model.layers[1].mlp.shared_experts
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(shared, name, QuantisedLinear(getattr(shared, name)))
    model.lm_head = QuantisedLinear(model.lm_head)
    loss = model(**batch).loss
    patch_model(model, tiny)
    left = {entry.module: entry.note for entry in model.longmoe.entries if entry.schedule is None}
    assert "no parameters to compute gradients for" in left.pop("model.layers.1.mlp.shared_experts")
    assert left and set(left) == {"lm_head"}
    torch.testing.assert_close(model(**batch).loss, loss, rtol=1e-6, atol=0)
