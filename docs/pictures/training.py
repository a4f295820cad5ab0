"""
The pictures of a real run for docs/pictures.md: `peaks.png` and `tensorboard.png`, in this folder.

    python docs/pictures/training.py

Trains a small Mixtral on the CPU on sequences that grow from 128 to 2,048 tokens, stock and patched, with TensorBoard
as the tracker. `peaks.png` is what ComponentPeakCallback leaves in the patched run's folder. The scalars are read back
from TensorBoard's event files and drawn with matplotlib: `tensorboard --logdir runs/pictures` shows the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from hf_longmoe import ComponentPeakCallback, DispatchConfig, LongMoEConfig, VocabConfig, patch_model

HERE, RUNS = Path(__file__).parent, Path("runs/pictures")
LENGTHS = (128, 256, 512, 1024, 2048)
CAPS = LongMoEConfig(dispatch=DispatchConfig(budget="1MiB"), vocab=VocabConfig(budget="2MiB"))
SHOWN = ("dispatch", "vocab", "boundaries", "optimizer", "layer", "total")


class Growing(torch.utils.data.IterableDataset):
    """Two sequences of random tokens of each length, in that order."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for length in LENGTHS:
            for _ in range(2):
                ids = torch.randint(4096, (length,), generator=generator)
                yield {"input_ids": ids, "labels": ids}


def train(name: str) -> Path:
    """Returns the run's folder, with the callback's files and TensorBoard's."""
    folder = RUNS / name
    shutil.rmtree(folder, ignore_errors=True)
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder)
    set_seed(0)
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
    )
    model = AutoModelForCausalLM.from_config(config)
    if name == "patched":
        patch_model(model, CAPS)
    args = TrainingArguments(
        str(folder),
        max_steps=2 * len(LENGTHS),
        per_device_train_batch_size=1,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        save_strategy="no",
        report_to="tensorboard",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    peaks = ComponentPeakCallback(every=1, first=1)
    Trainer(model=model, args=args, train_dataset=Growing(), callbacks=[peaks]).train()
    return folder


def scalars(folder: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values by tag, from the event file in `folder`."""
    events = EventAccumulator(str(folder)).Reload()
    read = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {tag: ([one.step for one in found], [one.value for one in found]) for tag, found in read.items()}


def draw(path: Path, runs: dict[str, dict[str, tuple[list[int], list[float]]]]) -> None:
    """A panel for each component's tag, and a line for each run, as TensorBoard lays them out."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, component in zip(figure.subplots(2, 3).flat, SHOWN, strict=True):
        for (name, found), colour in zip(runs.items(), ("#8c9bab", "#2f6db5"), strict=True):
            tag = next(tag for tag in found if tag.endswith(f"peak/{component}_MiB"))
            panel.plot(*found[tag], marker="o", markersize=3, label=name, color=colour)
        panel.set_title(tag, fontsize=9, loc="left")
        panel.set_ylim(bottom=0)
        panel.grid(color="#e6e6e6", linewidth=0.6)
        panel.tick_params(labelsize=8)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.supxlabel(f"step (two of each length: {', '.join(f'{n:,}' for n in LENGTHS)} tokens)", fontsize=9)
    figure.savefig(path, dpi=100)


def reduce(path: Path) -> None:
    """To 64 colours: a third of the size."""
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    folders = {name: train(name) for name in ("stock", "patched")}
    shutil.copyfile(folders["patched"] / "peaks.png", HERE / "peaks.png")
    draw(HERE / "tensorboard.png", {name: scalars(folder) for name, folder in folders.items()})
    for picture in HERE.glob("*.png"):
        reduce(picture)
