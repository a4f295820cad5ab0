"""Script for `launch`: which options of the Trainer checkpoints of a sharded model follow, and which are refused."""

import os
import tempfile
from pathlib import Path

import ranks
import resumed_run
import torch
from torch import distributed

from hf_longmoe.integrations.transformers import LongMoETrainer
from hf_longmoe.integrations.transformers.export import export


def shared_folder():
    folder = [tempfile.mkdtemp() if distributed.get_rank() == 0 else None]
    distributed.broadcast_object_list(folder)
    if distributed.get_rank() == 0:
        resumed_run.make_model(f"{folder[0]}/model")
    distributed.barrier()
    return folder[0]


def made(folder, **options):
    return resumed_run.trainer(f"{folder}/model", f"{folder}/run", f"{folder}/losses", ranks=2, **options)[0]


def error_of(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def weights(trainer):
    return {name: param.full_tensor().clone() for name, param in trainer.model.named_parameters()}


def best(case):
    """The first evaluation is called the best: its checkpoint outlives the rotation, and is loaded at the end."""
    folder, seen = shared_folder(), {}
    trainer = made(
        folder,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,
    )
    evaluate = trainer.evaluate

    def evaluated(*args, **kwargs):
        seen[trainer.state.global_step] = weights(trainer)
        return evaluate(*args, **kwargs)

    trainer.evaluate = evaluated
    trainer.train()
    now, best = weights(trainer), int(trainer.state.best_model_checkpoint.rpartition("-")[2])
    distributed.barrier()
    return {
        "left": sorted(os.listdir(f"{folder}/run")),
        "best": best,
        "loaded": all(torch.equal(value, seen[best][name]) for name, value in now.items()),
        "moved": any(not torch.equal(value, seen[6][name]) for name, value in now.items()),
        "args": [trainer.args.save_only_model, trainer.args.enable_jit_checkpoint],
    }


def refused(case):
    folder = shared_folder()
    trainer = made(folder, max_steps=2)
    found = {"nothing there": error_of(lambda: trainer.train(resume_from_checkpoint=True))}
    trainer.train()
    found["other batch"] = error_of(
        lambda: made(folder, gradient_accumulation_steps=3).train(resume_from_checkpoint=True)
    )
    skipping = made(folder, gradient_accumulation_steps=3, ignore_data_skip=True, max_steps=3)
    found["data skip ignored"] = error_of(lambda: skipping.train(resume_from_checkpoint=True))
    Path(folder, "run", "checkpoint-8").mkdir(exist_ok=True)
    distributed.barrier()
    found["stock checkpoint"] = error_of(lambda: made(folder).train(resume_from_checkpoint=True))
    found["export among ranks"] = error_of(lambda: export(f"{folder}/run/checkpoint-2", f"{folder}/exported"))
    if distributed.get_rank() == 0:
        resumed_run.make_model(f"{folder}/model", tie_word_embeddings=True)
        resumed_run.make_model(f"{folder}/even/model", tie_word_embeddings=True, vocab_size=resumed_run.VOCABULARY + 1)
    distributed.barrier()
    found["tied"] = error_of(made(folder, max_steps=1).train)
    found["tied, even"] = error_of(made(f"{folder}/even", max_steps=1, save_strategy="no").train)
    found["save_on_each_node"] = error_of(lambda: made(folder, save_on_each_node=True))
    return found


def args_after(case):
    """What is set for the time of the stock `__init__` is put back where that fails."""
    folder = shared_folder()
    args = made(folder).args
    args.enable_jit_checkpoint, args.eval_strategy = True, "steps"  # which needs a dataset
    error = error_of(lambda: LongMoETrainer(model=made(folder).model, args=args))
    return {"error": error, "args": [args.save_only_model, args.enable_jit_checkpoint]}


KINDS = {function.__name__: function for function in (best, refused, args_after)}

if __name__ == "__main__":
    ranks.main(lambda case: KINDS[case["kind"]](case))
