"""Script for `launch`: `Trainer.train` with and without `LongMoEPlugin`, on a fake device, DDP and FSDP2 + EP."""

import os
import tempfile

import ranks
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from hf_longmoe import DispatchConfig, LongMoEConfig, LongMoEPlugin, OptimizerConfig, VocabConfig, patch_model
from hf_longmoe.schedules.host import FakeEngine

VOCABULARY, LAYERS = 101, 4
OPTIONS = dict(hidden_size=32, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)


def build(case, path):
    if case["kind"] == "ddp":
        return AutoModelForCausalLM.from_pretrained(path)
    sharding = DistributedConfig(
        fsdp_size=2, ep_size=2, ep_implementation="pipelined_llep", fsdp_plan={"lm_head": "free_full_weight"}
    )
    return AutoModelForCausalLM.from_pretrained(path, distributed_config=sharding)


def run(case):
    rank = distributed.get_rank()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(folder)
    if rank == 0:
        torch.manual_seed(0)
        config = AutoConfig.for_model("mixtral", vocab_size=VOCABULARY, num_hidden_layers=LAYERS, **OPTIONS)
        AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder[0]}/model")
    distributed.barrier()
    model = build(case, f"{folder[0]}/model")
    caps = LongMoEConfig(
        dispatch=DispatchConfig(budget="1MiB"),
        vocab=VocabConfig(budget="64KiB"),
        optimizer=OptimizerConfig(bucket="16KiB", update_on=case["update_on"]),
    )
    patch_model(model, caps)
    generator = torch.Generator().manual_seed(1)
    data = Dataset.from_dict(
        {"input_ids": (ids := torch.randint(3, VOCABULARY, (24, 20), generator=generator)).tolist()}
    )
    data = data.add_column("labels", ids.tolist())
    args = TrainingArguments(
        folder[0],
        use_cpu=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-2,
        warmup_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        activation_checkpointing=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=data)
    found = {}
    if case["plugin"]:
        engine = FakeEngine(seed=rank)
        plugin = LongMoEPlugin(caps, engine=engine).install(trainer.accelerator)
    trainer.train()
    if case["plugin"]:
        offload = plugin._models[0].offload
        found = {"offloaded": offload.offloaded, "staging": engine.peak_device_bytes, "sent": engine.sent["down"]}
        plugin.remove()
        found |= {"host": engine.host_bytes, "device": engine.device_bytes}
    logs = [log for log in trainer.state.log_history if "loss" in log]
    weights = sum(getattr(p, "_local_tensor", p).double().abs().sum().item() for p in model.parameters())
    return {
        "losses": [log["loss"] for log in logs],
        "norms": [log["grad_norm"] for log in logs],
        "weights": weights,
        **found,
    }


def fsdp2(case):
    """Accelerate's own FSDP2 in a plain loop. It offers that on accelerators only, so the state is set by hand."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        activation_checkpointing=True,
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    torch.manual_seed(0)
    options = {**OPTIONS, "tie_word_embeddings": case.get("tied", False)}
    config = AutoConfig.for_model("mixtral", vocab_size=VOCABULARY, num_hidden_layers=LAYERS, **options)
    model = AutoModelForCausalLM.from_config(config)
    head = model.lm_head.weight.detach().clone()
    caps = LongMoEConfig(
        dispatch=DispatchConfig(budget="1MiB"),
        vocab=VocabConfig(budget="64KiB"),
        optimizer=OptimizerConfig(bucket="16KiB", update_on="cpu"),
    )
    if case["patched"]:
        patch_model(model, caps)
    engine = FakeEngine(seed=distributed.get_rank())
    plugin = LongMoEPlugin(caps, engine=engine).install(accelerator) if case["plugin"] else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert torch.equal(model.lm_head.weight.full_tensor(), head)
    model.train()

    def steps(first, last):
        losses = []
        for step in range(first, last):
            ids = (torch.arange(32)[None] * (step + 2) + distributed.get_rank()) % VOCABULARY
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    losses = steps(0, 2)
    folder = [tempfile.mkdtemp() if distributed.get_rank() == 0 else None]
    distributed.broadcast_object_list(folder)
    accelerator.save_state(folder[0])
    losses += (after := steps(2, 4))
    accelerator.load_state(folder[0])
    found = {"losses": losses, "resumed": steps(2, 4) == after}
    if case["patched"]:
        found["head"] = [str(entry) for entry in model.longmoe.entries if entry.component == "vocab"]
    if plugin is not None:
        found["offloaded"] = plugin._models[0].offload.offloaded
        plugin.remove()
        found["host"] = engine.host_bytes
    return found


if __name__ == "__main__":
    ranks.main(lambda case: fsdp2(case) if case["kind"] == "fsdp2" else run(case))
