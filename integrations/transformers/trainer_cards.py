"""The model card of what a Trainer saves: which schedules it was trained with, and the peaks that were measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers.modelcard import TrainingSummary

from hf_longmoe.integrations.transformers.callback import ComponentPeakCallback
from hf_longmoe.integrations.transformers.causal_lm import causal_lm
from hf_longmoe.integrations.transformers.entry import Entry
from hf_longmoe.peaks import PeakReport
from hf_longmoe.peaks.table import shown_components
from hf_longmoe.sizes import format_bytes

__all__ = ["TAG", "TrainerCards"]

TAG = "hf-longmoe"
_BEGIN, _END = "<!-- hf_longmoe -->", "<!-- /hf_longmoe -->"


class TrainerCards:
    """
    A mixin of `Trainer`: the cards that it writes also have a section on memory.

    It holds the lines of `model.longmoe` and of an installed `LongMoEPlugin`, and, of a `ComponentPeakCallback` among
    the callbacks, the peaks of the last training, with its picture where it lies beside the card. A model that is
    not patched and was not measured has the stock card.

    `push_to_hub` and `create_model_card` write the stock card with this section. `save_model(folder)` does so in
    `folder`, without asking the Hub for anything; a README.md that is there already is kept but for the section.
    """

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; in its `output_dir`."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            self._add_memory(Path(self.args.output_dir))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's; with a model card, unless the Trainer itself calls it."""
        super().save_model(output_dir, _internal_call)
        pushed = self.args.push_to_hub  # which has written the card
        if self.is_world_process_zero() and not _internal_call and not (pushed and output_dir is None):
            self._add_memory(Path(self.args.output_dir if output_dir is None else output_dir))

    def _add_memory(self, folder: Path) -> None:
        section = memory_section(self, folder)
        if section is None:
            return
        path = folder / "README.md"
        if path.exists():
            card = ModelCard.load(path)
        else:
            # With a license it does not look for the base model's on the Hub.
            card = ModelCard(TrainingSummary.from_trainer(self, model_name=folder.name, license="").to_model_card())
            card.data.license = None
        tags = card.data.tags or []
        card.data.tags = tags if TAG in tags else [*tags, TAG]
        before, _, rest = card.text.partition(_BEGIN)
        after = rest.partition(_END)[2].strip()
        card.text = "\n\n".join(part for part in (before.strip(), section, after) if part) + "\n"
        card.save(path)


def memory_section(trainer: Any, folder: Path) -> str | None:
    """
    Arguments:
        folder: where the card will be; `peaks.png` is shown if it is there.

    Returns:
        Markdown between two comments, by which a later one finds it; `None` where there is nothing to say.
    """
    patch = getattr(causal_lm(trainer.model), "longmoe", None)
    plugin = getattr(trainer.accelerator, "longmoe", None)
    callbacks = trainer.callback_handler.callbacks
    measured = [c.report for c in callbacks if isinstance(c, ComponentPeakCallback) and c.report is not None]
    lines = [*(() if patch is None else _folded(patch.entries)), *(() if plugin is None else str(plugin).splitlines())]
    if not lines and not measured:
        return None
    parts = [_BEGIN, "## Memory"]
    if lines:
        lines = "\n".join(lines)
        parts += [
            "Trained with hf_longmoe. Its schedules change order and granularity, not the loss or the gradients.",
            f"```\n{lines}\n```",
        ]
    if measured:
        config = None if patch is None else patch.config
        caps = {name: getattr(config, name).budget for name in ("dispatch", "vocab") if getattr(config, name, None)}
        parts += [_peaks(measured[-1], caps)]
        parts += ["![Peak memory by component](peaks.png)"] * (folder / "peaks.png").exists()
    return "\n\n".join([*parts, _END])


def _folded(entries: list[Entry]) -> list[str]:
    """The report's lines; of those that differ in the module alone, the first, and how many there are."""
    same: dict[tuple, list[Entry]] = {}
    for entry in entries:
        same.setdefault((entry.component, entry.schedule, entry.note), []).append(entry)
    return [f"{first}{_more(len(more))}" for first, *more in same.values()]


def _more(count: int) -> str:
    return f", and {count} more module{'s' * (count > 1)}" if count else ""


def _peaks(report: PeakReport, caps: dict[str, int]) -> str:
    steps, ranks = (f"{n} {word}{'s' * (n > 1)}" for n, word in ((report.steps, "step"), (report.ranks, "rank")))
    rows = ["| component | own peak | at the total's peak | working | cap |", "|---|---:|---:|---:|---:|"]
    for name in shown_components(report):
        part = report.components[name]
        cap = format_bytes(caps[name]) if name in caps else ""
        sizes = " | ".join(format_bytes(size) for size in (part.peak, part.at_peak, part.working))
        rows.append(f"| {name} | {sizes} | {cap} |")
    total = format_bytes(report.total)
    rows.append(f"| **total** | {total} | {total} | | |")
    intro = f"Peak bytes of one rank in training, the highest of {steps} and {ranks} ({report.probe} probe):"
    return f"{intro}\n\n" + "\n".join(rows)
