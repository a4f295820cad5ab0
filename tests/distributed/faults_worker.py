"""Script of `test_faults`: runs that are killed, run out of memory or disk, or get a signal; how their ranks ended."""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import forked
import resumed_run
import torch
from transformers import TrainerCallback

AT = 4  # the step before which a fault is laid; a checkpoint of it is on the disk


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Fault(TrainerCallback):
    """Lays `kind` on the ranks `on`, once `AT` steps are done."""

    def __init__(self, kind, on, rank):
        self.kind, self.mine, self.made = kind, rank in on, None

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if self.mine and state.global_step == AT:
            getattr(self, self.kind)(model)

    def step(self, model):
        model.model.layers[1].register_forward_pre_hook(lambda *_: die())

    def forward(self, model):
        def fail(*_):
            raise torch.OutOfMemoryError("out of memory, in forward")

        model.model.layers[1].register_forward_pre_hook(fail)

    def backward(self, model):
        def fail(*_):
            raise torch.OutOfMemoryError("out of memory, in backward")

        model.model.layers[1].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)

    def writing(self, model):
        """Dies when the optimizer's file is opened."""
        sys.addaudithook(
            lambda name, args: "saving-checkpoint-6/optimizer/shard" in _path(name, "open", args) and die()
        )

    def renaming(self, model):
        """Dies before the rename that publishes the checkpoint, with the older one of that name moved away."""
        sys.addaudithook(lambda name, args: ".saving-checkpoint-6" in _path(name, "os.rename", args) and die())

    def disk(self, model):
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # Python ignores SIGXFSZ: write() fails

    def term(self, model):
        os.kill(os.getpid(), signal.SIGTERM)

    def copies(self, model):
        copy, left = self.made.down, [7]

        def down(*args, **kwargs):
            left[0] -= 1
            return copy(*args, **kwargs) if left[0] else die()

        self.made.down = down


def _path(name, wanted, args):
    return str(args[0]) if name == wanted and args else ""


def run(folder, name, case, resume=None):
    def work(rank):
        fault = [Fault(case["kind"], case["on"], rank)] if "kind" in case else []
        made, engine = resumed_run.trainer(
            f"{folder}/model",
            f"{folder}/{name}",
            f"{folder}/{name}.losses",
            ranks=2,
            callbacks=fault,
            max_steps=7,
            streaming=True,
            **case.get("options", {}),
        )
        for one in fault:
            one.made = engine
        try:
            made.train(resume_from_checkpoint=resume)
        except Exception:
            if case.get("stays") and rank in case["on"]:  # as in a notebook: its connections stay open
                time.sleep(30)
            raise

    return forked.launch(work, 2, f"{folder}/{name}.logs", to_the_end=case.get("kind") in ("forward", "backward"))


def files(checkpoint):
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*.safetensors")}


def main(folder, cases):
    """
    A case: `kind` and `on` of its `Fault`; `options` of the Trainer; `resume`, to go on after it; `over`, the earlier
    case whose last checkpoints are there already.
    """
    resumed_run.make_model(f"{folder}/model")
    results, reference = {}, None
    for name, case in cases.items():
        at = Path(folder) / name
        if "over" in case:
            at.mkdir()
            os.rename(f"{folder}/{case['over']}/checkpoint-6", at / "checkpoint-6")
        found = {"ended": run(folder, name, case), "losses": resumed_run.read_losses(f"{at}.losses")}
        found["left"] = sorted(path.name for path in at.iterdir())
        saved = files(at / f"checkpoint-{AT}")
        reference = reference or saved  # of the first case
        found["same"] = len(saved) == 4 and saved == reference
        if case.get("resume"):
            os.rename(f"{at}.losses", f"{at}.before")
            found["resumed"] = [rank["code"] for rank in run(folder, name, {}, resume=True)]
            found["after"] = resumed_run.read_losses(f"{at}.losses")
            found["left_after"] = sorted(path.name for path in at.iterdir())
        results[name] = found
    Path(folder, "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[1], "cases.json").read_text()))
