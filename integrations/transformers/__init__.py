"""Transformers: `patch_model`, `unpatch_model`, `ComponentPeakCallback`."""
