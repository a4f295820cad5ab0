"""Run by test_every_family_ep.py: any MoE family under FSDP2 and expert parallelism against one process, fp32."""

import logging
import re
import shutil
import tempfile
import warnings
from dataclasses import replace

import ranks
import torch
from torch import distributed
from transformers.distributed import DistributedConfig

from benchmarks.every_family import Widened, caps_of, drawn, model_of
from benchmarks.expert_plans import load, save
from hf_longmoe import patch_model
from hf_longmoe.integrations.transformers.traffic import Traffic

TOKENS = (20, 17)  # of each rank
FP32 = torch.float32
TWO = {"fsdp_size": 2, "ep_size": 2}


def run(case):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return loaded_by_itself(case["family"]) if case["by_itself"] else trained(case["family"], case["rounding"])


def trained(family, rounding):
    """A step of the patched model on two ranks; errors of rank 0 are those of all gradients."""
    rank = distributed.get_rank()
    ids = [torch.randint(3, 1900, (1, count), generator=torch.Generator().manual_seed(count)) for count in TOKENS]
    folder, said = tempfile.mkdtemp(), [None]
    if rank == 0:
        reference = model_of(family, FP32)
        save(family, reference, folder)
        losses, wanted = step(reference, ids)
        said = [(folder, type(reference), losses)]
    distributed.broadcast_object_list(said)
    path, kind, losses = said[0]
    sharding = DistributedConfig(**TWO, ep_implementation="pipelined_llep")
    model = load(family, kind, path, dtype=FP32, distributed_config=sharding).train()
    dispatch = replace(caps_of(family).dispatch, imbalance=1.0)
    patch_model(model, replace(caps_of(family), dispatch=dispatch))
    with Traffic(model) as traffic:
        found, grads = step(model, ids[rank : rank + 1])
    (loss, _), (wanted_loss, scale) = found[0], losses[rank]
    errors = {"loss": abs(loss - wanted_loss) / max(abs(wanted_loss), scale)}
    if rank == 0:
        errors.update(apart(grads, wanted))
    shutil.rmtree(folder)
    return {
        "errors": errors,
        "rounding": rounding_of(family, ids, wanted) if rounding and rank == 0 else {},
        "waves": {name: layer.waves for name, layer in traffic.layers.items()},
        "lent": sum(layer.lent for layer in traffic.layers.values()),
        "entries": [str(entry) for entry in model.longmoe.entries],
    }


def step(model, ids):
    """Losses of sequences, each with the size that a mean of so many random terms has, and the mean's gradients."""
    losses, scales = [], []
    for row in ids:
        with drawn():
            logits = model(input_ids=row, attention_mask=torch.ones_like(row)).logits
        projection = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=FP32)
        losses.append((logits * projection).mean())
        scales.append((logits.std() / logits.numel() ** 0.5).item())
    (sum(losses) / len(losses)).backward()
    found = [(loss.item(), scale) for loss, scale in zip(losses, scales, strict=True)]
    return found, {name: whole(p.grad) for name, p in model.named_parameters()}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def apart(found, wanted):
    """Each gradient's largest error, of its largest element."""
    without = {name for name, grad in wanted.items() if grad is None}
    assert without == {name for name, grad in found.items() if grad is None}
    errors = {}
    for name in wanted.keys() - without:
        difference, largest = (found[name] - wanted[name]).abs().max().item(), wanted[name].abs().max().item()
        errors[name] = difference / largest if largest else float(difference > 0)
    return errors


def rounding_of(family, ids, grads):
    """How far one process is from float64, of each kind of module: those of all layers together."""
    with Widened():
        exact = step(model_of(family), ids)[1]
    errors = {}
    for name, error in apart(grads, exact).items():
        kind = kind_of(name)
        errors[kind] = max(error, errors.get(kind, 0))
    return errors


def kind_of(parameter):
    """Of the module that has it."""
    return re.sub(r"\d+", "*", parameter.rpartition(".")[0])


def loaded_by_itself(family):
    """What Transformers does on two ranks without help: the error it raises, or the parameters that are others."""
    folder, said = tempfile.mkdtemp(), [None]
    model = model_of(family, FP32)
    if distributed.get_rank() == 0:
        model.save_pretrained(folder)
        said = [folder]
    distributed.broadcast_object_list(said)
    found = {}
    try:
        other = type(model).from_pretrained(said[0], dtype=FP32, distributed_config=DistributedConfig(**TWO))
        weights = {name: whole(param) for name, param in other.named_parameters()}
        found["others"] = [name for name, param in model.named_parameters() if not param.equal(weights[name])]
    except RuntimeError as error:
        found["error"] = str(error)
    distributed.barrier()
    shutil.rmtree(folder)
    return found


if __name__ == "__main__":
    ranks.main(run)
