"""One line of `model.longmoe`'s report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Action", "Entry"]

Action = Callable[[], None]


@dataclass(frozen=True)
class Entry:
    """One line of the report: what happened to one module."""

    module: str
    component: str
    schedule: str | None  # None: left alone
    note: str

    def __str__(self) -> str:
        return f"{self.module}: {self.component}, {self.schedule or 'left alone'} ({self.note})"
