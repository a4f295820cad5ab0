"""Whether Axolotl is there, and new enough."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

__all__ = ["check_axolotl"]

_FIRST = "0.19"


def check_axolotl() -> None:
    """
    Raises:
        `ImportError`: Axolotl is missing or too old.
    """
    try:
        found = metadata.version("axolotl")
    except metadata.PackageNotFoundError:
        found = None
    if found is None or Version(Version(found).base_version) < Version(_FIRST):
        state = "is not installed" if found is None else f"is {found}"
        raise ImportError(
            f"hf_longmoe.integrations.axolotl needs axolotl>={_FIRST}, which {state}. Axolotl 0.19 pins"
            " transformers==5.16.1, older than hf_longmoe takes: see the README there."
        )
