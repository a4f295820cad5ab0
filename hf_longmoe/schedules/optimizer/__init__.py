"""OffloadStreamAdamW: AdamW whose state lives in host memory, stepped as a pipeline of buckets."""

from hf_longmoe.schedules.optimizer.adamw import OffloadStreamAdamW
from hf_longmoe.schedules.optimizer.arena import state_bytes
from hf_longmoe.schedules.optimizer.checks import check_adamw
from hf_longmoe.schedules.optimizer.record import Timings

__all__ = ["OffloadStreamAdamW", "Timings", "check_adamw", "state_bytes"]
