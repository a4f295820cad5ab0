"""Script of `test_resume`: runs killed at a random moment and resumed; and resumed on another number of ranks."""

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import forked
import resumed_run
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_longmoe.integrations.transformers.export import export

STEPS = 7


def run(folder, name, ranks=2, resume=None, at=None, then=None, **options):
    def work(rank):
        paths = f"{folder}/model", f"{folder}/{name}", f"{folder}/{name}.losses"
        made, _ = resumed_run.trainer(*paths, ranks=ranks, max_steps=STEPS, **options)
        made.train(resume_from_checkpoint=resume)
        if then:
            then(made)

    ended = forked.launch(work, ranks, f"{folder}/{name}.logs", at=at)
    return [rank["code"] for rank in ended], [rank["said"] for rank in ended if rank["code"] == 1]


def trial(folder, number):
    """Killed after a random step and a random part of the next one, or of a save; then resumed, or begun anew."""
    draw, name, streaming = random.Random(number), f"trial{number}", number % 2 == 0
    step, delay = draw.randrange(1, STEPS), draw.random() * 0.5
    victims, due, looked = draw.choice([[0, 1], [0, 1], [0], [1]]), None, 0.0

    def kill(pids):
        nonlocal due, looked
        if due is None and time.monotonic() - looked < 0.05:
            return
        looked = time.monotonic()
        if due is None and len(resumed_run.read_losses(f"{folder}/{name}.losses")) >= step:
            due = time.monotonic() + delay
        if due and time.monotonic() > due and len(pids) == 2:
            for victim in victims:
                os.kill(pids[victim], signal.SIGKILL)
            due = float("inf")

    killed, said = run(folder, name, at=kill, streaming=streaming)
    before = resumed_run.read_losses(f"{folder}/{name}.losses")
    os.rename(f"{folder}/{name}.losses", f"{folder}/{name}.before")
    last = max((int(path.name.split("-")[1]) for path in Path(folder, name).glob("checkpoint-*")), default=0)
    resumed, failed = run(folder, name, resume=last > 0, streaming=streaming)
    return {
        "victims": victims,
        "killed": killed,
        "said": said,
        "before": before,
        "last": last,
        "resumed": resumed,
        "failed": failed,
        "after": resumed_run.read_losses(f"{folder}/{name}.losses"),
        "reference": "streaming" if streaming else "plain",
    }


def trials(folder, numbers):
    names = ["streaming", "plain"][: len({number % 2 for number in numbers})]
    found = {name: run(folder, name, streaming=name == "streaming")[0] for name in names}
    losses = {name: resumed_run.read_losses(f"{folder}/{name}.losses") for name in found}
    return {"references": found, "losses": losses, "trials": [trial(folder, number) for number in numbers]}


def other_ranks(folder, routes):
    """Routes: `{name: [ranks and sizes of the run that saves, [of those that go on], options]}`."""
    results = {}
    for name, (saving, resuming, options) in routes.items():
        options = {"dropout": 0.0, "save_steps": 4, **options}
        live, plain, exported = (f"{folder}/{name}-{kind}" for kind in ("live", "plain", "exported"))
        codes, said = run(folder, name, then=lambda made, to=(live, plain): keep(made, *to), **saving, **options)
        found = results[name] = {"codes": codes, "said": said, "resumed": {}}
        found["losses"] = resumed_run.read_losses(f"{folder}/{name}.losses")
        export(f"{folder}/{name}/checkpoint-{STEPS}", exported)
        found |= same_models(live, plain, exported)
        for sizes in resuming:
            at = f"{name}-on-{sizes['ranks']}"
            codes, said = run(folder, at, resume=f"{folder}/{name}/checkpoint-4", **sizes, **options)
            losses = resumed_run.read_losses(f"{folder}/{at}.losses")
            found["resumed"][at] = {"codes": codes, "said": said, "losses": losses}
    return results


def keep(made, live, plain):
    """The model of a run that has ended: as it is, gathered, and as `save_model` writes it."""
    whole = {name: param.full_tensor().detach() for name, param in made.model.named_parameters()}
    if made.is_world_process_zero():
        torch.save(whole, live)
    made.save_model(plain)


def same_models(live, *folders):
    """
    Whether each parameter, loaded by stock Transformers in one process, and each expert's matrices by the names that
    the Hub has for them, are the live ones in all folders, bit by bit.
    """
    live, same = torch.load(live, weights_only=True), {"tensors": {}, "experts": {}}
    for folder in folders:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
        assert loaded.keys() == live.keys()
        for name, value in live.items():
            same["tensors"][name] = torch.equal(loaded[name], value) and same["tensors"].get(name, True)
        stored = load_file(f"{folder}/model.safetensors")
        for name, value in live.items():
            layer, _, kind = name.partition(".mlp.experts.")
            for expert in range(len(value)) if kind else ():
                parts = value[expert].chunk(2) if kind == "gate_up_proj" else [value[expert]]
                for of, part in zip(("w1", "w3") if len(parts) == 2 else ("w2",), parts, strict=True):
                    at = f"{layer}.block_sparse_moe.experts.{expert}.{of}.weight"
                    same["experts"][f"{at} in {folder}"] = torch.equal(stored[at], part)
    return same


def main(folder, cases):
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
    resumed_run.make_model(f"{folder}/model")
    results = {
        kind: {"trials": trials, "other_ranks": other_ranks}[kind](folder, case) for kind, case in cases.items()
    }
    Path(folder, "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[1], "cases.json").read_text()))
