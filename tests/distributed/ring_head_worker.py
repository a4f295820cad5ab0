"""Run by test_ring_head.py: a model whose LM head FSDP2 divides, against one process, fp32."""

import tempfile

import ranks
import torch
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig, patch_model, unpatch_model
from hf_longmoe.integrations.transformers.regions import watch
from hf_longmoe.peaks import StorageProbe

VOCABULARY = 129


def working(case, model, given):
    """What the head holds in a step, its budget, and what that leaves aside."""
    model.train()
    with StorageProbe() as probe, watch(model) as handle:
        model(**given).loss.backward()
    model.zero_grad()
    return [probe.report().components["vocab"].working, 64 << 10, handle.beside_caps["vocab"]]


def run(case):
    rank, size = distributed.get_rank(), distributed.get_world_size()
    path = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(path)
    if rank == 0:
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            case["family"],
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=4,
            vocab_size=VOCABULARY,
            tie_word_embeddings=case["tied"],
            **case["config"],
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path[0])
    distributed.barrier()
    reference = AutoModelForCausalLM.from_pretrained(path[0], dtype=torch.float32).train()
    shared = case["sharding"].get("tp_size", 1)  # neighbours that compute one batch together
    data = size // shared
    sharding = {"fsdp_size": data, "ep_size": 2, "ep_implementation": "pipelined_llep", **case["sharding"]}
    plan = {"lm_head": "free_full_weight"} if case["own group"] else None
    model = AutoModelForCausalLM.from_pretrained(
        path[0], dtype=torch.float32, distributed_config=DistributedConfig(**sharding, fsdp_plan=plan)
    ).train()
    vocab = VocabConfig(budget="64KiB", schedule=case["schedule"], z_loss=case["z_loss"])
    try:
        patch_model(model, LongMoEConfig(dispatch=DispatchConfig(budget="1MiB"), vocab=vocab))
    except ValueError as error:
        return {"refused": str(error)}

    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, VOCABULARY, (1, 30 + 7 * r), generator=generator) for r in range(data)]
    labels = [i.clone() for i in ids]
    labels[0][:, :9] = -100
    mine = rank // shared
    labels[-1][:] = -100 if case["one masked"] else labels[-1]
    inputs = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
    if case["items"]:
        inputs = [{**given, "num_items_in_batch": torch.tensor(case["items"])} for given in inputs]
    if case["shifted"]:  # as a context-parallel loader gives them
        for given in inputs:
            given["shift_labels"] = given["labels"].roll(-1, 1)

    def reference_loss(given):
        if (given["labels"] == -100).all():
            return reference(input_ids=given["input_ids"]).logits.sum() * 0  # where stock gives NaN
        loss = reference(**given).loss
        if case["z_loss"]:
            shifted = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:]
            logits = reference(input_ids=given["input_ids"]).logits[shifted != -100]
            loss = loss + case["z_loss"] * logits.logsumexp(-1).square().mean()
        return loss

    full = []
    for _ in range(case["steps"]):
        loss = model(**inputs[mine]).loss
        loss.backward()
        held = model.lm_head.weight
        full.append(held.to_local().shape[0] if hasattr(held, "to_local") else 0)
        losses = [reference_loss(given) for given in inputs]
        (sum(losses) / data).backward()
    errors = {"loss": abs(loss - losses[mine]).item() / max(abs(losses[mine].item()), 1e-9)}
    found = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        wanted, grad = parameter.grad, found[name].grad
        assert (wanted is None) == (grad is None), name
        if wanted is not None and wanted.any():
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            errors[name] = ((grad - wanted).abs().max() / wanted.abs().max()).item()

    reference.eval(), model.eval()
    with torch.no_grad():
        output, wanted = model(**inputs[0]), reference(**inputs[0])
        evaluation = ((output.logits - wanted.logits).abs().max() / wanted.logits.abs().max()).item()
    model.save_pretrained(f"{path[0]}/saved")
    distributed.barrier()
    saved = AutoModelForCausalLM.from_pretrained(f"{path[0]}/saved", dtype=torch.float32)
    same = all(torch.equal(a, b) for a, b in zip(saved.parameters(), reference.parameters(), strict=True))
    used = working(case, model, inputs[mine])
    report = [str(entry) for entry in model.longmoe.entries if entry.component == "vocab"]
    head = model.lm_head
    unpatch_model(model)
    forward = getattr(vars(head).get("forward"), "__module__", None)  # tensor parallelism has one of its own
    return {
        "errors": errors,
        "evaluation": evaluation,
        "saved": same,
        "report": report,
        "working": used,
        "entries held": max(full),
        "restored": model.lm_head is head and (forward == "transformers.distributed.tensor_parallel") == (shared > 1),
    }


if __name__ == "__main__":
    ranks.main(run)
