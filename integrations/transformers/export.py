"""From a sharded checkpoint to a plain folder, as the Hub has them, in one process and without a Trainer."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import transformers
from torch import distributed
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoConfig

from hf_longmoe.integrations.transformers.checkpointing import DESCRIPTION, read_description

__all__ = ["export"]

# Beside the weights in a checkpoint; all else there is the tokenizer's, or the processor's.
_OF_THE_RUN = {DESCRIPTION, "scheduler.pt", "trainer_state.json", "training_args.bin"}


def export(checkpoint: str | Path, folder: str | Path) -> None:
    """
    Writes the model of a checkpoint of `LongMoETrainer` as `save_pretrained` does, with its tokenizer if it has one.

    Needs host memory for the whole model, no process group and no accelerator. `trainer.save_model(folder)` does the
    same of the model that is trained.

    Arguments:
        checkpoint: a folder `checkpoint-N` of a model that was sharded at load.
        folder: to be made or written into; `from_pretrained` of stock Transformers loads it.

    Raises:
        `ValueError`: `checkpoint` is no such folder, or one of a model with adapters; or this is one of several ranks.
    """
    checkpoint, folder = Path(checkpoint), Path(folder)
    if read_description(checkpoint) is None:
        raise ValueError(
            f"checkpoint={str(checkpoint)!r} has no {DESCRIPTION}, so that it is none of a LongMoETrainer of a model"
            " sharded at load. Stock checkpoints are plain folders already."
        )
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ValueError(
            f"export is for one process by itself, and here are {distributed.get_world_size()} ranks, which would wait"
            " for each other: call it when they have ended, or trainer.save_model(folder) on all of them."
        )
    if any(name.startswith("base_model.") for name in _names(checkpoint)):
        raise ValueError(
            f"checkpoint={str(checkpoint)!r} is of a model with PEFT's adapters around it, to resume from alone:"
            " trainer.save_model(folder) writes the adapters."
        )
    name = AutoConfig.from_pretrained(checkpoint).architectures[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        model = getattr(transformers, name).from_pretrained(checkpoint)
    model.save_pretrained(folder)
    for path in checkpoint.iterdir():
        ours = path.name in _OF_THE_RUN or path.name.startswith(("rng_state", "shard-"))
        if path.is_file() and not ours and not (folder / path.name).exists():
            shutil.copy2(path, folder)


def _names(checkpoint: Path) -> list[str]:
    """Of its parameters and buffers."""
    return list(HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata)
