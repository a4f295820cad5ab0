"""Peak bytes of a step beyond the tensors that no schedule can save."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from hf_longmoe.peaks import StorageProbe

__all__ = ["Peaks", "peaks"]

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Peaks(NamedTuple):
    """
    Arguments:
        beyond: the most bytes alive at once, less all excluded tensors, whether or not they were alive just then.
            That is how much more memory the step needs than any step needs that makes the same tensors.
        beside: the most bytes alive at once that are not of excluded tensors: what a schedule's budget bounds. It may
            fall at a moment when some gradients do not exist yet, so it is at least `beyond`.
        total: the most bytes alive at once.
        by_system: as `beyond`, by the resident memory of the process. `None` where the system cannot tell (it needs
            Linux's `/proc`).
    """

    beyond: int
    beside: int
    total: int
    by_system: int | None


def peaks(
    run: Callable[[], torch.Tensor], given: list[torch.Tensor], leaves: list[torch.Tensor]
) -> tuple[Peaks, torch.Tensor]:
    """
    Runs one step and returns its peaks and its output.

    Excluded are the tensors given, the output, and all gradients (the parameters' and the input's; the output's is
    among those given).

    Arguments:
        run: forward and backward; returns the output.
        given: alive before the step and after it.
        leaves: those of `given` that get a gradient.
    """
    before = _resident_after_trim()
    with StorageProbe() as probe:
        probe.tag("parameters", given)
        output = run()
        made = [output.detach(), *(leaf.grad for leaf in leaves)]
        # A storage belongs to its last owner for its whole life, so that this takes them out from their first byte on.
        probe.tag("parameters", made)
    highest = _high_water()
    report = probe.report()
    excluded = report.components["parameters"].peak  # all of them are alive by now
    by_system = None
    if before is not None and highest is not None:
        by_system = highest - before - sum(tensor.untyped_storage().nbytes() for tensor in made)
    return Peaks(report.total - excluded, report.components["other"].peak, report.total, by_system), output


def _resident_after_trim() -> int | None:
    """Gives free heap back to the system, lowers the high-water mark to what is resident, and returns that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except OSError:
        return None


def _high_water() -> int | None:
    with suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 if found else None
    return None
