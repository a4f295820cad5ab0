"""The keys that the plugin adds to Axolotl's YAML."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, field_validator

from hf_longmoe.config import LongMoEConfig

__all__ = ["LongMoEArgs", "config_of"]


class LongMoEArgs(BaseModel):
    """
    Arguments:
        longmoe: the caps as `LongMoEConfig.from_dict` takes them: `dispatch`, `vocab`, `boundaries`, `optimizer`, each
            a mapping, or null to switch that part off. What is left out has its default.
        longmoe_peaks_every: log the component peaks of one step in so many; 0: of none.
    """

    longmoe: dict[str, dict[str, Any] | None] | None = None
    longmoe_peaks_every: int = Field(default=10, ge=0)

    @field_validator("longmoe")
    @classmethod
    def _known_caps(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        config_of({"longmoe": value})
        return value


def config_of(cfg: Any) -> LongMoEConfig:
    """
    Arguments:
        cfg: Axolotl's configuration, a mapping.

    Raises:
        `ValueError`: an unknown key below `longmoe`, or a value out of range.
    """
    parts = cfg.get("longmoe") or {}
    return LongMoEConfig.from_dict({name: None if part is None else dict(part) for name, part in parts.items()})
