"""Predict: what a model needs in a layout, as plain integers."""

from hf_longmoe.planner.counts import Counts
from hf_longmoe.planner.depth import Moments, extrapolate, periods
from hf_longmoe.planner.plan import Plan
from hf_longmoe.planner.predict import Prediction
from hf_longmoe.planner.shape import LayerParameters, Layout, ModelShape

__all__ = [
    "Counts",
    "LayerParameters",
    "Layout",
    "ModelShape",
    "Moments",
    "Plan",
    "Prediction",
    "extrapolate",
    "periods",
]
