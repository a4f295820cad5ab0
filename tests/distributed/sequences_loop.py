"""Cases of sequences_worker.py: what ranks that share sequences refuse together, and plain Accelerate loops."""

import os

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longmoe import BoundariesConfig, DispatchConfig, LongMoEConfig, LongMoEPlugin, VocabConfig, patch_model
from hf_longmoe.integrations.accelerate import ContextParallelismConfig
from hf_longmoe.integrations.ringmaster.sequences import SharedSequences

SIZES = dict(hidden_size=32, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)


def tiny(family="mixtral", **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=101, num_hidden_layers=2, **{**SIZES, **options})
    return AutoModelForCausalLM.from_config(config).train()


def said(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return None


def refusals(group):
    """What each rank says; the last rank alone has the bad batch, or another one than the rank it shares it with."""
    rank, last = distributed.get_rank(), distributed.get_rank() == distributed.get_world_size() - 1
    model = tiny()
    shared, found = SharedSequences(model, group), {}
    generator = torch.Generator().manual_seed(rank // group.size())
    ids = torch.randint(3, 101, (2, 12), generator=generator)
    good = {"input_ids": ids, "labels": ids}
    left = torch.ones_like(ids)
    left[0, 0] = 0
    bad = {
        "left padding": {**good, "attention_mask": left},
        "short": {"input_ids": ids[:, :1], "labels": ids[:, :1]},
        "another batch": {"input_ids": ids.flip(0), "labels": ids.flip(0)},
        "a longer batch": {"input_ids": ids.repeat(1, 2), "labels": ids.repeat(1, 2)},
        "no input_ids": {"inputs_embeds": torch.zeros(2, 12, 32), "labels": ids},
        "no labels": {"input_ids": ids},
    }
    for name, batch in bad.items():
        found[name] = said(model, **(batch if last else good))
    found["the heads"] = said(SharedSequences, tiny(num_key_value_heads=1), group)
    wrong = tiny(family="qwen3_moe", sliding_window=5, use_sliding_window=True, num_experts_per_tok=2)
    wrong.model.layers[1].self_attn.sliding_window = 7  # stock SDPA goes by the mask, other kernels by the layer
    SharedSequences(wrong, group)
    found["windows that differ"] = said(wrong, **good)
    found["a router's loss, not patched"] = said(model, **good, output_router_logits=True)
    found["a layer without attention"] = said(_without_attention(tiny(), group), **good)
    loss = model(**good).loss  # goes on as if nothing had been
    loss.backward()
    found["after"] = bool(loss.isfinite())
    shared.remove(model)
    return found


def _without_attention(model, group):
    SharedSequences(model, group)
    layer = model.model.layers[1].self_attn
    layer.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    return model


def loop(kind):
    """Two steps of a plain loop: losses (their mean over ranks) and the weights after them."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    size = distributed.get_world_size()
    config = None if kind == "stock" else ContextParallelismConfig(cp_size=size)
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    if kind == "fsdp2":  # which Accelerate offers on accelerators only
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            activation_checkpointing=True,
            cpu_ram_efficient_loading=False,
        )
    model = tiny()
    caps = LongMoEConfig(
        dispatch=DispatchConfig(budget="1MiB"),
        vocab=VocabConfig(budget="64KiB"),
        boundaries=BoundariesConfig(),
        optimizer=None,
    )
    if kind in ("fsdp2", "patched"):
        patch_model(model, caps)
    if kind == "lora" or kind == "stock lora":
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    plugin = None if kind.startswith("stock") else LongMoEPlugin(caps).install(accelerator)
    params = [param for param in model.parameters() if param.requires_grad]
    rows = [torch.randint(3, 101, (13,), generator=torch.Generator().manual_seed(at)) for at in range(4)]
    loader = torch.utils.data.DataLoader([{"input_ids": ids, "labels": ids} for ids in rows], batch_size=2)
    optimizer = torch.optim.SGD(params, lr=0.5)
    if kind.startswith("stock"):  # one process, which every rank is for itself
        batches = list(loader)
    else:
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader)
        assert len(batches) == 2
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    params = [param for param in model.parameters() if param.requires_grad]
    whole = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in params]
    found = {"losses": losses, "weights": sorted(param.double().square().sum().item() for param in whole)}
    if plugin is not None:
        plugin.remove()
        found["given back"] = accelerator.parallelism_config is config
    return found
