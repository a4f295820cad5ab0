"""What offloading to host memory needs of a device and of the host; shared by boundaries and the optimizer."""

from hf_longmoe.schedules.host.accelerator import AcceleratorEngine, has_own_memory
from hf_longmoe.schedules.host.engine import Engine, Job
from hf_longmoe.schedules.host.fake import FakeEngine
from hf_longmoe.schedules.host.memory import (
    HostBudget,
    HostPool,
    Slab,
    check_host_memory,
    host_memory_available,
)

__all__ = [
    "AcceleratorEngine",
    "Engine",
    "FakeEngine",
    "HostBudget",
    "HostPool",
    "Job",
    "Slab",
    "check_host_memory",
    "has_own_memory",
    "host_memory_available",
]
