"""Predict: what a model needs in a layout, as plain integers."""

from hf_longmoe.planner.depth import Moments, extrapolate, periods
from hf_longmoe.planner.shape import LayerParameters, Layout, ModelShape

__all__ = ["LayerParameters", "Layout", "ModelShape", "Moments", "extrapolate", "periods"]
