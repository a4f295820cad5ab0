"""Whether axolotl-ringmaster is there, asked before anything of it is imported."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

__all__ = ["check_ringmaster"]

_FIRST = "0.2.7"


def check_ringmaster() -> None:
    """
    Raises:
        `ImportError`: axolotl-ringmaster, which `cp_size` above 1 needs, is missing or too old.
    """
    try:
        found = metadata.version("axolotl-ringmaster")
    except metadata.PackageNotFoundError:
        found = None
    if found is None or Version(found) < Version(_FIRST):
        state = "is not installed" if found is None else f"is {found}"
        raise ImportError(
            f"ParallelismConfig(cp_size=...) above 1 needs axolotl-ringmaster>={_FIRST}, which {state}:"
            " pip install hf-longmoe[cp]"
        )
