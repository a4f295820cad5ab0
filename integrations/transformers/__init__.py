"""Transformers: `patch_model`, `unpatch_model`, `ComponentPeakCallback`."""

from hf_longmoe.integrations.transformers.callback import ComponentPeakCallback
from hf_longmoe.integrations.transformers.patch import Patch, patch_model, unpatch_model

__all__ = ["ComponentPeakCallback", "Patch", "patch_model", "unpatch_model"]
