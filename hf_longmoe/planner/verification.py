"""A prediction beside a measurement, component by component."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_longmoe.peaks.report import PeakReport
from hf_longmoe.planner.predict import Prediction

__all__ = ["Row", "Verification", "compare", "off"]

_NEGLIGIBLE = 1e-3  # share of the measured total: a component below it is not compared


@dataclass(frozen=True)
class Row:
    """
    Arguments:
        component: its name, or `"total"`.
        predicted, measured: bytes.
    """

    component: str
    predicted: int
    measured: int

    @property
    def difference(self) -> float:
        """Relative to the measured bytes, as an absolute value."""
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return abs(self.predicted - self.measured) / self.measured


@dataclass(frozen=True)
class Verification:
    """
    Arguments:
        depths: layers of the fake steps.
        rows: by way of running (`"unbounded"`, `"scheduled"`).
    """

    depths: tuple[int, ...]
    rows: Mapping[str, Sequence[Row]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in `hf-longmoe plan --verify --json`."""
        return {
            "depths": list(self.depths),
            "rows": {
                way: [
                    {
                        "component": row.component,
                        "predicted_bytes": row.predicted,
                        "measured_bytes": row.measured,
                        "difference": row.difference if math.isfinite(row.difference) else None,
                    }
                    for row in rows
                ]
                for way, rows in self.rows.items()
            },
        }

    @property
    def worst(self) -> Row:
        return max((row for rows in self.rows.values() for row in rows), key=lambda row: row.difference)


def compare(predicted: Prediction, measured: PeakReport) -> list[Row]:
    """One row a component that holds at least a thousandth of the measured total, and one of the total."""
    least = _NEGLIGIBLE * measured.total
    rows = []
    for name, part in measured.components.items():
        own = predicted.components.get(name, 0)
        if max(own, part.peak) >= least:
            rows.append(Row(name, own, part.peak))
    return [*rows, Row("total", predicted.total, measured.total)]


def off(rows: Sequence[Row], beyond: float) -> list[str]:
    """The components (the total aside) whose difference is beyond a share, each with its direction."""
    return [
        f"{row.component} {'above' if row.measured > row.predicted else 'below'}"
        for row in rows
        if row.component != "total" and row.difference > beyond
    ]
