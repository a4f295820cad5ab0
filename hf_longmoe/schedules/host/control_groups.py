"""What Linux control groups (containers, Slurm, systemd) leave a process: memory, and time on cores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path

__all__ = ["control_group_limits", "control_group_memory"]

_ROOT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_NO_LIMIT = 2**60  # version 1 says "none" by a number above this
# (limit, used, the page cache that can be dropped, in memory.stat) of versions 2 and 1.
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def control_group_memory(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes that this process's control groups, and those above them, still give; None: no limit."""
    left = []
    for folder in _folders("memory", root, _groups(membership)):
        for limit, used, cache in _MEMORY:
            for most in _numbers(folder / limit):
                if most < _NO_LIMIT:
                    taken = next(iter(_numbers(folder / used)), 0)
                    left.append(max(most - taken + _statistic(folder / "memory.stat", cache), 0))
    return min(left, default=None)


def control_group_limits(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> tuple[int | None, float | None]:
    """
    The lowest limits of this process's control groups and of those above them, of version 1 and 2.

    Returns:
        Bytes of memory and cores' worth of time; None: no limit.
    """
    groups = _groups(membership)
    memory = [
        number
        for folder in _folders("memory", root, groups)
        for name in ("memory.max", "memory.limit_in_bytes")
        for number in _numbers(folder / name)
        if number < _NO_LIMIT
    ]
    cores = []
    for folder in _folders("cpu", root, groups):
        new = _numbers(folder / "cpu.max")
        quota, period = new if len(new) == 2 else (0, 0)
        for number in _numbers(folder / "cpu.cfs_quota_us"):
            quota, period = number, next(iter(_numbers(folder / "cpu.cfs_period_us")), 0)
        if quota > 0 and period > 0:
            cores.append(quota / period)
    return min(memory, default=None), min(cores, default=None)


def _groups(membership: Path) -> list[list[str]]:
    try:
        return [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return []


def _folders(controller: str, root: Path, groups: Iterable[list[str]]) -> Iterator[Path]:
    """The folder of each group, and those above it up to where the hierarchy is mounted."""
    for group in groups:
        if len(group) == 3 and (not group[1] or controller in group[1].split(",")):
            mount = root / group[1]
            own = mount / group[2].lstrip("/")
            yield from takewhile(lambda folder, mount=mount: folder.is_relative_to(mount), (own, *own.parents))


def _numbers(file: Path) -> list[int]:
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):  # none, or "max"
        return []


def _statistic(file: Path, name: str) -> int:
    try:
        values = dict(line.split() for line in file.read_text().splitlines())
        return int(values.get(name, 0))
    except (OSError, ValueError):
        return 0
