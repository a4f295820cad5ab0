"""The JSON schema of `peaks.json`. A change that an older reader would misread raises `FORMAT_VERSION`."""

from __future__ import annotations

from typing import Any

from hf_longmoe.peaks.region import COMPONENTS, PHASES
from hf_longmoe.peaks.report import FORMAT_VERSION

__all__ = ["PEAKS_SCHEMA"]

_BYTES = {"type": "integer", "minimum": 0}


def _object(properties: dict[str, Any], required: tuple[str, ...] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }


_PHASES = _object(dict.fromkeys(PHASES, _BYTES), required=())
_COMPONENT = _object({"peak": _BYTES, "at_peak": _BYTES, "working": _BYTES, "phases": _PHASES})
_REPORT = _object(
    {
        "total": _BYTES,
        "components": _object(dict.fromkeys(COMPONENTS, _COMPONENT)),
        "phases": _PHASES,
        "probe": {"enum": ["storage", "allocator"]},
        "steps": {"type": "integer", "minimum": 1},
        "ranks": {"type": "integer", "minimum": 1},
    }
)
PEAKS_SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Peak bytes of training steps, per component",
    **_object(
        {
            "format": {"const": "hf-longmoe peaks"},
            "version": {"const": FORMAT_VERSION},
            "unit": {"const": "bytes"},
            "reports": {"type": "object", "additionalProperties": _REPORT, "minProperties": 1},
        }
    ),
}
