"""Whether the installed hosts are new enough, asked before they are imported."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

__all__ = ["check_versions"]

_HOSTS = ("torch", "transformers", "accelerate")


def check_versions() -> None:
    """
    Compares what is installed with what this package's own metadata asks for. A pre-release counts as its release; a
    package that runs from a folder, without metadata, is not checked.

    Raises:
        `ImportError`: torch, Transformers or Accelerate is missing or of a wrong version.
    """
    try:
        requirements = map(Requirement, metadata.requires("hf_longmoe") or ())
    except metadata.PackageNotFoundError:
        return
    wanted = {r.name: r.specifier for r in requirements if r.name in _HOSTS and r.marker is None}
    wrong = []
    for name, specifier in wanted.items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append((f"{name}{specifier}", "not installed"))
            continue
        if not specifier.contains(Version(installed).base_version):
            wrong.append((f"{name}{specifier}", f"{installed} is installed"))
    if wrong:
        needs = "; ".join(f"{need} ({found})" for need, found in wrong)
        install = " ".join(f'"{need}"' for need, _ in wrong)
        raise ImportError(f"hf_longmoe needs {needs}. To get it: pip install {install}")
