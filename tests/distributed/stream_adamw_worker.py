"""Script for `launch`: OffloadStreamAdamW on FSDP2 shards, beside a plain fused AdamW on the same model."""

import copy
import tempfile
from pathlib import Path

import torch
from ranks import main, mesh_of
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hf_longmoe.schedules.host import FakeEngine
from hf_longmoe.schedules.optimizer import OffloadStreamAdamW

OPTIONS = dict(lr=1e-2, weight_decay=0.1)


def build(case, seed=0):
    """Uneven and empty shards: 71 rows, 1 row. `mixed`: the last layer is sharded over this rank alone."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 71), nn.Tanh(), nn.Linear(71, 1), nn.Tanh(), nn.Linear(1, 9))
    model.to(getattr(torch, case.get("dtype", "float32")))
    policy = CPUOffloadPolicy(pin_memory=False) if case.get("cpu_offload") else OffloadPolicy()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for number in (0, 2, 4):
        alone = case.get("mixed") and number == 4
        over = mesh_of([[rank] for rank in range(distributed.get_world_size())], "own") if alone else mesh
        fully_shard(model[number], mesh=over, offload_policy=policy, mp_policy=MixedPrecisionPolicy())
    if not case.get("mixed"):
        fully_shard(model, mesh=mesh, offload_policy=policy)
    return model


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        torch.manual_seed(1000 + 10 * step + distributed.get_rank())
        data = torch.randn(5, 12, dtype=next(model.parameters()).dtype)
        model(data).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def streaming(model, case, rank_seed=0):
    engine = None if case.get("cpu_offload") else FakeEngine(rank_seed + distributed.get_rank())
    options = dict(bucket=case.get("bucket", 2048), update_on=case.get("update_on", "cpu"), engine=engine)
    options["early_gradients"] = case.get("early", False)
    return OffloadStreamAdamW(model.parameters(), **OPTIONS, **options), engine


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same(ours, theirs):
    return all(torch.equal(local(a), local(b)) for a, b in zip(ours, theirs, strict=True))


def same_state(ours, theirs, keys=("step", "exp_avg", "exp_avg_sq")):
    pairs = zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True)
    return all(same([ours.state[p][k] for k in keys], [theirs.state[q][k] for k in keys]) for p, q in pairs)


def exact(case):
    """Against fused AdamW on float32 copies of the shards, given the same gradients."""
    model = build(case)
    optimizer, engine = streaming(model, case)
    params = list(model.parameters())
    masters = [nn.Parameter(local(p.detach()).float().clone()) for p in params]
    plain = torch.optim.AdamW(masters, **OPTIONS, fused=True)
    fresh = 0

    def give(*_):
        nonlocal fresh
        for p, master in zip(params, masters, strict=True):
            if p.grad is not None:
                master.grad = local(p.grad).float().clone()
        fresh += sum(e.seen is not None and e.version() != e.seen for e in optimizer._book.entries.values())

    if not case.get("early"):
        optimizer.register_step_pre_hook(give)
        for _ in range(6):
            train(model, optimizer, 1, first=_)
            plain.step()
        equal = same(params, [m.to(p.dtype) for p, m in zip(params, masters, strict=True)])
    else:  # the gradients have left: two models
        other = build(case)
        plain = torch.optim.AdamW(other.parameters(), **OPTIONS, fused=True)
        train(other, plain, 6)
        train(model, optimizer, 6)
        equal = same(params, other.parameters())
    kinds = {type(optimizer.state[p]["exp_avg"]) is type(p.data) for p in params}
    placements = all(
        optimizer.state[p]["exp_avg"].placements == p.placements and optimizer.state[p]["exp_avg"].shape == p.shape
        for p in params
    )
    moments = case.get("early") or all(
        torch.equal(local(optimizer.state[p]["exp_avg_sq"]), plain.state[m]["exp_avg_sq"])
        for p, m in zip(params, masters, strict=True)
    )
    return {
        "equal": equal,
        "moments": moments,
        "resynchronised": fresh,
        "dtensors": kinds == {True} and placements,
        "device_bytes": engine.device_bytes if engine else 0,
        "sent": sum(engine.sent.values()) if engine else 0,
        "share": optimizer.param_groups[0]["accelerator_share"],
        "sizes": [local(p).numel() for p in params],
    }


def resume(case):
    """Through torch.distributed.checkpoint's files, into a new model and optimizer."""
    model = build(case)
    optimizer, _ = streaming(model, case)
    train(model, optimizer, 3)
    folder = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(folder, src=0)
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(saved, checkpoint_id=folder[0])
    train(model, optimizer, 3, first=3)

    other = build(case, seed=1)
    again, _ = streaming(other, case, rank_seed=10)
    template = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, again)}
    checkpoint.load(template, checkpoint_id=folder[0])
    set_optimizer_state_dict(other, again, template["optimizer"])  # before the model: the master must hold
    other.load_state_dict(template["model"])
    share = again.param_groups[0]["accelerator_share"]
    train(other, again, 3, first=3)
    masters = ("master",) if case.get("dtype", "float32") != "float32" else ()
    return {
        "equal": same(other.parameters(), model.parameters()),
        "state": same_state(again, optimizer, ("step", "exp_avg", "exp_avg_sq", *masters)),
        "share": share == optimizer.param_groups[0]["accelerator_share"],
        "lr": again.param_groups[0]["lr"],
        "files": len(list(Path(folder[0]).glob("*.distcp"))),
    }


def plain_there_and_back(case):
    """plain -> ours -> plain, through get/set_optimizer_state_dict, against plain alone."""
    model, other = build(case), build(case)
    plain = torch.optim.AdamW(model.parameters(), **OPTIONS, fused=True)
    train(model, plain, 2)
    ours, _ = streaming(other, case)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    set_optimizer_state_dict(other, ours, copy.deepcopy(get_optimizer_state_dict(model, plain)))
    first = same_state(ours, plain)
    train(model, plain, 2, first=2)
    train(other, ours, 2, first=2)
    second = same_state(ours, plain) and same(model.parameters(), other.parameters())
    third = build(case)
    third.load_state_dict(copy.deepcopy(other.state_dict()))
    back = torch.optim.AdamW(third.parameters(), **OPTIONS, fused=True)
    back.load_state_dict(copy.deepcopy(ours.plain_state_dict()))
    back.param_groups[0]["fused"] = True
    train(model, plain, 2, first=4)
    train(third, back, 2, first=4)
    return {"taken": first, "equal": second, "given": same(model.parameters(), third.parameters())}


def taken_over(case):
    """`from_adamw` in the middle of a run."""
    model, other = build(case), build(case)
    plain = torch.optim.AdamW(model.parameters(), **OPTIONS, fused=True)
    start = torch.optim.AdamW(other.parameters(), **OPTIONS, fused=True)
    train(model, plain, 4)
    train(other, start, 2)
    ours = OffloadStreamAdamW.from_adamw(start, bucket=2048, update_on="accelerator", engine=FakeEngine(1))
    train(other, ours, 2, first=2)
    return {"equal": same(model.parameters(), other.parameters()) and same_state(ours, plain)}


def decided_together(case):
    """Rank 0's decision holds for all."""
    model = build(case)
    optimizer, _ = streaming(model, case)
    if distributed.get_rank():
        import hf_longmoe.schedules.optimizer.stream as stream

        stream.best_share, kept = (lambda *_: 0.123), stream.best_share
    train(model, optimizer, 2)
    if distributed.get_rank():
        stream.best_share = kept
    return {"share": optimizer.param_groups[0]["accelerator_share"]}


KINDS = {f.__name__: f for f in (exact, resume, plain_there_and_back, taken_over, decided_together)}


if __name__ == "__main__":
    main(lambda case: KINDS[case["kind"]](case))
