"""Transformers: `patch_model`, `unpatch_model`, `ComponentPeakCallback`, `plan`."""

from hf_longmoe.integrations.transformers.versions import check_versions

check_versions()  # first: with an old host the imports below fail on whatever name it lacks

from hf_longmoe.integrations.transformers.callback import ComponentPeakCallback  # noqa: E402
from hf_longmoe.integrations.transformers.patch import Patch, patch_model, unpatch_model  # noqa: E402
from hf_longmoe.integrations.transformers.planning import plan  # noqa: E402
from hf_longmoe.integrations.transformers.trainer import LongMoETrainer, LongMoETrainerMixin  # noqa: E402

__all__ = [
    "ComponentPeakCallback",
    "LongMoETrainer",
    "LongMoETrainerMixin",
    "Patch",
    "patch_model",
    "plan",
    "unpatch_model",
]
