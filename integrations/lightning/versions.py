"""Whether Lightning is there, and new enough."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

__all__ = ["check_lightning"]

_FIRST = "2.6"


def check_lightning() -> None:
    """
    Raises:
        `ImportError`: Lightning is missing or too old.
    """
    try:
        found = metadata.version("lightning")
    except metadata.PackageNotFoundError:
        found = None
    if found is None or Version(Version(found).base_version) < Version(_FIRST):
        state = "is not installed" if found is None else f"is {found}"
        raise ImportError(
            f"hf_longmoe.integrations.lightning needs lightning>={_FIRST}, which {state}: pip install"
            " hf-longmoe[lightning]"
        )
