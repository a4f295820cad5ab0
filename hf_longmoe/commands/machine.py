"""What `hf-longmoe doctor` finds out. Plain dicts, as in its JSON; whatever is absent or does not tell is None."""

from __future__ import annotations

import dataclasses
import difflib
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import hf_longmoe
from hf_longmoe.config import BoundariesConfig, DispatchConfig, OptimizerConfig, VocabConfig

__all__ = ["devices", "environment", "host", "packages", "threads"]

_HOSTS = ("torch", "transformers", "accelerate", "peft", "datasets")
_EXTRAS = {"plot": "matplotlib", "cp": "axolotl-ringmaster"}
_PARTS = (DispatchConfig, VocabConfig, BoundariesConfig, OptimizerConfig)
_PREFIX = "LONGMOE_"
_CAP_IPC_LOCK = 14  # Linux's number of the capability that lifts the limit on locked memory


# -- packages --------------------------------------------------------------------------------------------------------
def packages() -> dict[str, Any]:
    """Versions from the packages' metadata: none of them is imported."""
    wanted = _wanted()
    return {
        "hf_longmoe": hf_longmoe.__version__,
        "python": platform.python_version(),
        "hosts": {name: _package(name, wanted) for name in _HOSTS},
        "extras": {extra: {"package": name, **_package(name, wanted)} for extra, name in _EXTRAS.items()},
    }


def _package(name: str, wanted: dict[str, Any]) -> dict[str, Any]:
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        installed = None
    specifier = wanted.get(name)
    fits = None
    if installed is not None and specifier is not None:
        from packaging.version import InvalidVersion, Version

        try:
            fits = specifier.contains(Version(installed).base_version)  # a pre-release counts as its release
        except InvalidVersion:
            fits = None
    return {"installed": installed, "needs": None if specifier is None else str(specifier), "fits": fits}


def _wanted() -> dict[str, Any]:
    """The ranges of this package's own metadata, which the integrations check; {} where they cannot be read."""
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(text) for text in metadata.requires("hf_longmoe") or ()]
    except (ImportError, metadata.PackageNotFoundError):
        return {}
    # Extras come last and would replace what everyone needs.
    return {r.name: r.specifier for r in reversed(requirements)}


# -- devices ---------------------------------------------------------------------------------------------------------
def devices() -> dict[str, Any]:
    """The accelerators that torch sees, their memory in bytes, and the links that it tells of."""
    found: dict[str, Any] = {"kind": None, "devices": [], "peers": None, "built_for": None, "error": None}
    found["driver"] = _driver()
    try:
        import torch

        from hf_longmoe.schedules.host import has_own_memory
    except (ImportError, OSError) as error:
        return {**found, "error": " ".join(str(error).split())}
    found["built_for"] = next(
        (name for name, version in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)) if version), None
    )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return found
    found["kind"] = accelerator.type
    count = torch.accelerator.device_count()
    for index in range(count):
        device = torch.device(accelerator.type, index)
        free, total = _memory(index)
        found["devices"].append(
            {
                "name": _device_name(device),
                "free_bytes": free,
                "total_bytes": total,
                "own_memory": has_own_memory(device),
                "host_link": _host_link(device),
            }
        )
    if accelerator.type == "cuda" and count > 1:
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        reached = sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
        found["peers"] = "all" if reached == len(pairs) else "some" if reached else "none"
    return found


def _memory(index: int) -> tuple[int | None, int | None]:
    import torch

    try:
        return torch.accelerator.get_memory_info(index)
    except (RuntimeError, NotImplementedError):  # taken exclusively, full, or a backend that does not tell
        return None, None


def _device_name(device: Any) -> str | None:
    import torch

    tell = getattr(torch.get_device_module(device), "get_device_name", None)  # not every backend has it
    return None if tell is None else tell(device.index)


def _host_link(device: Any, folders: Path = Path("/sys/bus/pci/devices")) -> str | None:
    """The device's generation of PCIe and the lanes in use; None where torch or the system does not tell."""
    import torch

    if device.type != "cuda":
        return None
    try:
        properties = torch.cuda.get_device_properties(device)
        place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        speed = (folders / place / "max_link_speed").read_text().split()[0]  # the current one falls while it idles
        lanes = (folders / place / "current_link_width").read_text().strip()
    except (AttributeError, IndexError, OSError):
        return None
    return f"PCIe {speed} GT/s x{lanes}"


def _driver() -> str | None:
    """The driver of a GPU that the system has, whatever torch sees."""
    known = {"NVIDIA": "/dev/nvidia0", "AMD": "/dev/kfd"}
    return next((name for name, path in known.items() if Path(path).exists()), None)


# -- the host --------------------------------------------------------------------------------------------------------
def host() -> dict[str, Any]:
    """Host memory and its limits, in bytes. `lockable_bytes` is "unlimited" where nothing limits it."""
    total = available = None
    try:
        import psutil

        total = psutil.virtual_memory().total
        from hf_longmoe.schedules.host import host_memory_available

        available = host_memory_available()
    except (ImportError, OSError):
        pass
    from hf_longmoe.schedules.host.control_groups import control_group_limits

    limit, _ = control_group_limits()
    return {
        "total_bytes": total,
        "available_bytes": available,
        "control_group_bytes": limit,
        "lockable_bytes": _lockable(),
    }


def _lockable() -> int | str | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        status = Path("/proc/self/status").read_text()
        capabilities = int(re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)[1], 16)
    except (OSError, TypeError):
        capabilities = 0
    is_lifted = limit == resource.RLIM_INFINITY or capabilities >> _CAP_IPC_LOCK & 1
    return "unlimited" if is_lifted else limit


# -- threads and variables -------------------------------------------------------------------------------------------
def threads() -> dict[str, Any]:
    """`cores`: those that this process may run on; `quota`: cores' worth of time that its control group has."""
    torch_threads = update_threads = None
    try:
        import torch

        from hf_longmoe.schedules.optimizer.update import host_thread_count

        torch_threads, update_threads = torch.get_num_threads(), host_thread_count()
    except (ImportError, OSError):
        pass
    from hf_longmoe.schedules.host.control_groups import control_group_limits

    _, quota = control_group_limits()
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "quota": quota,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "torch_threads": torch_threads,
        "update_threads": update_threads,
    }


def environment() -> dict[str, Any]:
    """The LONGMOE_* variables that are set; the unknown ones with the nearest name; values that are refused."""
    known = [f"{part._name}_{field.name}".upper() for part in _PARTS for field in dataclasses.fields(part)]
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIX)}
    unknown = {}
    for name in given:
        own = name.removeprefix(_PREFIX)
        if own not in known:
            near = difflib.get_close_matches(own, known, n=1)
            unknown[name] = _PREFIX + near[0] if near else None
    refused, caps = [], {}
    for part in _PARTS:
        try:
            caps[part._name] = dataclasses.asdict(part())
        except ValueError as error:
            refused.append(str(error))
    return {"set": given, "unknown": unknown, "refused": refused, "caps": caps}
