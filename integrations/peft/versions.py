"""Whether the installed PEFT is one whose wrappers are known, asked before anything of it is imported."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

__all__ = ["check_peft"]

_FIRST = "0.21"


def check_peft() -> None:
    """
    Raises:
        `ImportError`: PEFT is too old for adapters on stacked expert weights to be recognised.
    """
    found = metadata.version("peft")
    if Version(Version(found).base_version) < Version(_FIRST):
        raise ImportError(f"hf_longmoe needs peft>={_FIRST}; {found} is installed: pip install 'peft>={_FIRST}'")
