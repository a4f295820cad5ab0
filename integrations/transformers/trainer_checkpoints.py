"""What a Trainer of a model sharded at load saves, and how it goes on from it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from transformers import TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, get_last_checkpoint
from transformers.utils import logging

from hf_longmoe.integrations.transformers import checkpoint_folder, checkpointing
from hf_longmoe.integrations.transformers.adapters import adapter_state_dict_of
from hf_longmoe.integrations.transformers.checkpointing import together
from hf_longmoe.integrations.transformers.end_together import end_together
from hf_longmoe.integrations.transformers.refusals import check_tied
from hf_longmoe.integrations.transformers.sigterm import StopOnSigterm

__all__ = ["TrainerCheckpoints"]

logger = logging.get_logger(__name__)


class TrainerCheckpoints:
    """
    A mixin of `Trainer`: checkpoints of models that `from_pretrained(distributed_config=...)` has sharded.

    The Trainer's own arguments say when (`save_strategy`, `save_steps`, `save_total_limit`, `load_best_model_at_end`)
    and `train(resume_from_checkpoint=True)` goes on from the last one, also on another number of ranks; at the same
    one with the bits of a run that was not stopped. Every rank writes its part of the model and the optimizer as
    safetensors, into a hidden folder beside that is renamed when all is on the disk: a checkpoint is whole or is not
    there. `AutoModelForCausalLM.from_pretrained` reads its weights as they are; `save_model` writes a plain folder.

    A map-style dataset goes on at its place. An iterable one is read from its start again, and what was trained on is
    thrown away: exact if it gives the same samples again and does not end within the run, so `.repeat(None)` a stream.
    `ignore_data_skip=True` starts it anew, or where its own `load_state_dict` has put it. A `datasets` stream of
    which each rank reads shards of its own (`dispatch_batches=False`) gives other samples on other numbers of ranks.

    A save that fails on one rank raises a `CheckpointError` on all, which ends the training as in a stock Trainer;
    earlier checkpoints stay. Any other error of one rank ends all with its message, see `end_together`.
    `enable_jit_checkpoint=True`: on SIGTERM the step is finished and saved, and `train` ends by `SystemExit(143)`.

    Models that were not sharded at load are saved by the stock Trainer; they can be resumed from a sharded checkpoint.

    Raises:
        `ValueError`: `save_on_each_node` or a `hub_strategy` other than "end", where checkpoints are divided;
            tied embeddings that the ranks cannot divide evenly, see `check_tied`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        found = next((one for one in (*args, *kwargs.values()) if isinstance(one, TrainingArguments)), None)
        model = kwargs.get("model", args[0] if args else None)
        with _as_stock_takes_it(model, found):
            super().__init__(*args, **kwargs)
        self._on_sigterm = None
        if self.is_distributed_loading_by_transformers:
            _check(self.args)
            if self.args.enable_jit_checkpoint:
                self.add_callback(StopOnSigterm)
                self._on_sigterm = self.callback_handler.callbacks[-1]

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if self.is_distributed_loading_by_transformers:
            check_tied(self.model)
        with end_together():
            resume_from_checkpoint = self._chosen(resume_from_checkpoint)
            with _listening(self._on_sigterm):
                output = super().train(resume_from_checkpoint, *args, **kwargs)
        if self._on_sigterm is not None and self._on_sigterm.stopped:
            where = Path(self._get_output_dir(None)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            if self.is_world_process_zero():
                print(f"hf_longmoe stopped at SIGTERM, after step {self.state.global_step}; saved in {where}.")
            raise SystemExit(128 + signal.SIGTERM)
        return output

    def _chosen(self, resume: str | bool | None) -> str | None:
        """The folder to resume from, rank 0's choice, seen by all ranks."""
        if not resume:
            return None
        run = Path(self.args.output_dir if resume is True else resume)
        run = run if resume is True else run.parent
        first = self.args.process_index == 0
        together(lambda: checkpoint_folder.recover(run) if first else None, f"look for a checkpoint in {run}")
        chosen = [resume if resume is not True else get_last_checkpoint(run) if first and run.is_dir() else None]
        if self.args.world_size > 1:
            distributed.broadcast_object_list(chosen)
        if chosen[0] is None:
            raise ValueError(f"resume_from_checkpoint=True: there is no checkpoint in {run}.")
        together(lambda: self._check_checkpoint(Path(chosen[0])), f"resume from {chosen[0]}")
        return str(chosen[0])

    def _check_checkpoint(self, folder: Path) -> None:
        description = checkpointing.read_description(folder)
        if description is None:
            if self.is_distributed_loading_by_transformers:
                raise ValueError(
                    f"{folder} has no {checkpointing.DESCRIPTION}: it was not saved by a LongMoETrainer of a model"
                    " sharded at load, or with save_only_model=True. Load its weights with from_pretrained instead."
                )
            return
        before, now = description["total_train_batch_size"], self.get_total_train_batch_size(self.args)
        if before != now and not self.args.ignore_data_skip:
            raise ValueError(
                f"The checkpoint's steps took {before} samples each ({description['ranks']} ranks), these would take"
                f" {now}, so that the place in the data would be another. Keep per_device_train_batch_size x"
                " gradient_accumulation_steps x ranks, or set ignore_data_skip=True."
            )

    # -- saving ------------------------------------------------------------------------------------------------------
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if not self.is_distributed_loading_by_transformers or self.args.save_only_model:
            super()._save_checkpoint(model, trial)
            return
        run = Path(self._get_output_dir(trial))
        target = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        what = f"save {target}"
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        first = self.args.process_index == 0
        aside = together(lambda: checkpoint_folder.begin(target) if first else None, what)
        aside = aside or checkpoint_folder.aside(target)
        together(lambda: _check_shared(aside), what)
        checkpointing.save_model(self.model, aside)
        optimizer = checkpointing.save_optimizer(self.model, _inner(self.optimizer), aside)
        self._note_best(run, target)
        together(lambda: self._save_the_rest(aside, optimizer), what)
        together(lambda: checkpoint_folder.publish(aside, target) if first else None, what)
        best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
        together(lambda: checkpoint_folder.rotate(run, limit, target, best) if first else None, "delete checkpoints")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and self.is_distributed_loading_by_transformers:
            state_dict = adapter_state_dict_of(self.model)
        super()._save(output_dir, state_dict)

    def _note_best(self, run: Path, target: Path) -> None:
        if self.state.best_global_step:
            best = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best == target or best.exists():
                self.state.best_model_checkpoint = str(best)

    def _save_the_rest(self, folder: Path, optimizer: dict[str, Any]) -> None:
        """All that is not divided: rank 0's, and each rank's random numbers."""
        self._save_rng_state(str(folder))
        if self.args.process_index == 0:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)
            inner = self.accelerator.unwrap_model(self.model)
            inner.config.save_pretrained(folder)
            if inner.can_generate():
                inner.generation_config.save_pretrained(folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            states: dict[str, Any] = {}
            for callback in [*self.callback_handler.callbacks, self.control]:
                if isinstance(callback, ExportableState):
                    states.setdefault(type(callback).__name__, []).append(callback.state())
            self.state.stateful_callbacks = {name: s if len(s) > 1 else s[0] for name, s in states.items()}
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
            batch = self.get_total_train_batch_size(self.args)
            checkpointing.describe(folder, optimizer, ranks=self.args.world_size, total_train_batch_size=batch)
        for path in folder.iterdir():  # shards were synced by the rank that wrote them
            mine = path.name == f"rng_state_{self.args.process_index}.pth"
            if mine or (self.args.process_index == 0 and path.is_file() and not path.name.startswith("rng_state")):
                checkpoint_folder.sync(path)

    # -- loading -----------------------------------------------------------------------------------------------------
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if checkpointing.read_description(Path(resume_from_checkpoint)) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            checkpointing.load_model(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or checkpointing.read_description(Path(checkpoint)) is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder = Path(checkpoint)
        came_from = checkpointing.load_optimizer(self.model, _inner(self.optimizer), folder)
        checkpointing.load_scheduler(self.lr_scheduler, folder, came_from)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if checkpointing.read_description(Path(best)) is None:
            super()._load_best_model()
        else:
            checkpointing.load_model(self.model, Path(best))


@contextlib.contextmanager
def _as_stock_takes_it(model: Any, args: TrainingArguments | None) -> Iterator[None]:
    """
    The stock `__init__` refuses what this class can do: `save_only_model` is set while it runs. Its callback for
    SIGTERM, and the handler that it sets for good, stay away too.
    """
    sharded = getattr(model, "is_distributed_loading_by_transformers", not isinstance(model, nn.Module))
    if args is None or not sharded:
        yield
        return
    before = {name: getattr(args, name) for name in ("save_only_model", "enable_jit_checkpoint")}
    args.save_only_model, args.enable_jit_checkpoint = True, False
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)


@contextlib.contextmanager
def _listening(callback: StopOnSigterm | None) -> Iterator[None]:
    if callback is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    callback.install()
    try:
        yield
    finally:
        callback.remove()


def _check(args: TrainingArguments) -> None:
    if args.save_strategy == "no" or args.save_only_model:
        return
    if args.save_on_each_node:
        raise ValueError(
            "save_on_each_node=True: the ranks of all nodes write one checkpoint of a model sharded at load, into an"
            " output_dir that all of them see. Use save_on_each_node=False."
        )
    if args.push_to_hub and args.hub_strategy != HubStrategy.END:
        raise ValueError(
            f'hub_strategy="{args.hub_strategy}": checkpoints of a model sharded at load are divided into parts, which'
            ' are not for the Hub. Use hub_strategy="end", which pushes the whole model when training has ended.'
        )


def _check_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise OSError(f"{folder}, which rank 0 has made, is not there: output_dir must be one that all ranks see")


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The one in Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
