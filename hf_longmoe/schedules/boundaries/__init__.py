"""Selective checkpoint offload (SCO): inputs of checkpointed layers wait for backward in host memory."""

from hf_longmoe.schedules.boundaries.offload import BoundaryOffload

__all__ = ["BoundaryOffload"]
