"""Expert dispatch: rows sorted by expert, in waves under a byte budget. See the README here."""

from hf_longmoe.schedules.dispatch.adapted import AdaptedMLP
from hf_longmoe.schedules.dispatch.blocks import Block, GatedMLP, ModelKernel
from hf_longmoe.schedules.dispatch.local import LocalDispatch, count_rows
from hf_longmoe.schedules.dispatch.low_rank import LowRank, Projection, with_factors
from hf_longmoe.schedules.dispatch.pipelined import PipelinedDispatch
from hf_longmoe.schedules.dispatch.plan import MIN_ROWS, Segment, Wave, plan_waves, rows
from hf_longmoe.schedules.dispatch.sizes import PipelineSizes, pipeline_sizes
from hf_longmoe.schedules.dispatch.tokenwise import TokenTiles

__all__ = [
    "MIN_ROWS",
    "AdaptedMLP",
    "Block",
    "GatedMLP",
    "LocalDispatch",
    "LowRank",
    "ModelKernel",
    "PipelineSizes",
    "PipelinedDispatch",
    "Projection",
    "Segment",
    "TokenTiles",
    "Wave",
    "count_rows",
    "pipeline_sizes",
    "plan_waves",
    "rows",
    "with_factors",
]
