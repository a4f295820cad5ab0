"""Long-context Mixture-of-Experts training with every memory peak bounded, exactly."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Loaded on first use: `import hf_longmoe` imports no host library, and not even torch.
_WHERE = {
    "BoundariesConfig": "hf_longmoe.config",
    "ComponentPeakCallback": "hf_longmoe.integrations.transformers",
    "DispatchConfig": "hf_longmoe.config",
    "LongMoEConfig": "hf_longmoe.config",
    "LongMoEPlugin": "hf_longmoe.integrations.accelerate",
    "LongMoETrainer": "hf_longmoe.integrations.transformers",
    "LongMoETrainerMixin": "hf_longmoe.integrations.transformers",
    "OffloadStreamAdamW": "hf_longmoe.schedules.optimizer",
    "OptimizerConfig": "hf_longmoe.config",
    "VocabConfig": "hf_longmoe.config",
    "component": "hf_longmoe.peaks",
    "Layout": "hf_longmoe.planner",
    "patch_model": "hf_longmoe.integrations.transformers",
    "plan": "hf_longmoe.integrations.transformers",
    "unpatch_model": "hf_longmoe.integrations.transformers",
}
__all__ = [*_WHERE]
__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from hf_longmoe.config import BoundariesConfig, DispatchConfig, LongMoEConfig, OptimizerConfig, VocabConfig
    from hf_longmoe.integrations.accelerate import LongMoEPlugin
    from hf_longmoe.integrations.transformers import (
        ComponentPeakCallback,
        LongMoETrainer,
        LongMoETrainerMixin,
        patch_model,
        plan,
        unpatch_model,
    )
    from hf_longmoe.peaks import component
    from hf_longmoe.planner import Layout
    from hf_longmoe.schedules.optimizer import OffloadStreamAdamW


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
