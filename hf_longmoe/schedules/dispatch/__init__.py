"""Expert dispatch: rows sorted by expert, in waves under a byte budget. See the README here."""

from hf_longmoe.schedules.dispatch.blocks import Block, GatedMLP, ModelKernel
from hf_longmoe.schedules.dispatch.local import LocalDispatch, count_rows
from hf_longmoe.schedules.dispatch.plan import MIN_ROWS, Segment, Wave, plan_waves, rows
from hf_longmoe.schedules.dispatch.tokenwise import TokenTiles

__all__ = [
    "MIN_ROWS",
    "Block",
    "GatedMLP",
    "LocalDispatch",
    "ModelKernel",
    "Segment",
    "TokenTiles",
    "Wave",
    "count_rows",
    "plan_waves",
    "rows",
]
