"""Run by test_sequences.py: one model whose ranks share sequences against the stock model of one process, fp64."""

import copy
import importlib.util
from pathlib import Path

import ranks
import torch
from sequences_loop import loop, refusals
from torch import distributed
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig, patch_model
from hf_longmoe.integrations.ringmaster.sequences import SharedSequences

spec = importlib.util.spec_from_file_location("families", Path(__file__).parents[1] / "conftest.py")
families = importlib.util.module_from_spec(spec)
spec.loader.exec_module(families)
CAPS = LongMoEConfig(dispatch=DispatchConfig(budget="64KiB"), vocab=VocabConfig(budget="64KiB"))


def build(case):
    torch.manual_seed(0)
    options = {"num_key_value_heads": 4} if case["cp"] == 4 else {}
    options = {**families._SMALL, **families.MODELS.get(case["family"], {}), **options, **case.get("config", {})}
    config = AutoConfig.for_model(case["family"], **options)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() > 1:
                param.normal_(0, 0.5 / param.shape[-1] ** 0.5 if "embed" not in name else 1.0)
    return model.double().train()


def batch_of(kind, seed, length):
    """`kind`: "plain", "padded" on the right, "packed", or "masked": labels at the end alone."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 101, (2, length), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    batch = {"input_ids": ids, "labels": labels}
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, -6:] = 0
        labels[1, -6:] = -100
    if kind == "packed":
        starts = torch.zeros_like(ids)
        for row, places in enumerate(((4, 5, length // 2), (length - 3,))):
            starts[row, list(places)] = 1
            labels[row, list(places)] = -100
        at = torch.arange(length)
        last = torch.where(starts.bool(), at, 0).cummax(1).values
        batch["position_ids"] = at - last
    if kind == "masked":
        labels[:, :-3] = -100
    return batch


def stock_loss(model, batch):
    """The stock model's, without the float32 in which it computes its loss."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    output = model(**inputs, use_cache=False)
    loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    aux = getattr(output, "aux_loss", None)
    return loss if aux is None else loss + model.router_aux_loss_coef * aux


def relative(got, want):
    if not want.any():
        return float(got.abs().max())
    return ((got - want).abs().max() / want.abs().max()).item()


def run(case):
    if "loop" in case:
        return loop(case["loop"])
    rank, world, size = distributed.get_rank(), distributed.get_world_size(), case["cp"]
    group = ranks.mesh_of([list(range(at, at + size)) for at in range(0, world, size)], "cp").get_group()
    if "refused" in case:
        return refusals(group)
    groups = world // size
    batches = [
        [batch_of(case["batch"], 7 * step + number, case["length"] - 2 * step) for number in range(groups)]
        for step in range(case.get("forwards", 1))
    ]
    reference, model = build(case), build(case)
    wanted = [[stock_loss(reference, batch) for batch in step] for step in batches]
    loss = sum(sum(step) for step in wanted) / groups
    loss.backward()
    if case.get("patched", True):
        patch_model(model, CAPS)
    shared = SharedSequences(model, group)
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": case["checkpointing"] == "reentrant"})
    own = [step[rank // size] for step in batches]
    outputs = [model(**batch) for batch in own]  # all of them, and then backward: replays are of different forwards
    total = sum(output.loss for output in outputs)
    total.backward()
    mean = total.detach().clone()
    distributed.all_reduce(mean)
    found = {"loss": relative(mean / world, loss.detach()), "gradients": 0.0}
    for param, want in zip(model.parameters(), reference.parameters(), strict=True):
        if param.grad is None and want.grad is None:
            continue
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        distributed.all_reduce(grad)
        found["gradients"] = max(found["gradients"], relative(grad / world, want.grad))
    # Evaluation: the loss of the whole on every rank; without labels, and in `generate`, each rank has all of it.
    model.eval(), reference.eval()
    with torch.no_grad():
        found["evaluation"] = max(relative(model(**batch).loss, stock_loss(reference, batch)) for batch in own)
        alone = {"input_ids": own[0]["input_ids"][:, : 5 + rank]}
        found["alone"] = relative(model(**alone).logits, reference(**alone).logits)
        options = {"max_new_tokens": 3, "do_sample": False, "use_cache": True, "pad_token_id": 0}
        found["generated"] = torch.equal(model.generate(**alone, **options), reference.generate(**alone, **options))
        copied = copy.deepcopy(model)
        found["evaluation"] = max(found["evaluation"], relative(copied(**own[0]).loss, stock_loss(reference, own[0])))
        found["saved"] = "longmoe" in model.config.to_json_string()
        shared.remove(model)
        found["removed"] = relative(model(**own[0]).loss, stock_loss(reference, own[0]))
    found["implementation"] = model.config._attn_implementation
    return found


if __name__ == "__main__":
    ranks.main(run)
