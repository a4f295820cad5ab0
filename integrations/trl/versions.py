"""Whether TRL is there, and of a version whose models have a fused LM head."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

__all__ = ["check_trl"]

_FIRST = "1.16"


def check_trl() -> None:
    """
    Raises:
        `ImportError`: TRL is missing or too old.
    """
    try:
        found = metadata.version("trl")
    except metadata.PackageNotFoundError:
        found = None
    if found is None or Version(Version(found).base_version) < Version(_FIRST):
        state = "is not installed" if found is None else f"is {found}"
        raise ImportError(
            f"hf_longmoe.integrations.trl needs trl>={_FIRST}, which {state}: pip install hf-longmoe[trl] (Python 3.11"
            " or newer)"
        )
