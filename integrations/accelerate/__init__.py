"""Accelerate: `LongMoEPlugin`, `ContextParallelismConfig`."""

from hf_longmoe.integrations.transformers.versions import check_versions

check_versions()

from hf_longmoe.integrations.accelerate.context_parallelism import ContextParallelismConfig  # noqa: E402
from hf_longmoe.integrations.accelerate.plugin import LongMoEPlugin  # noqa: E402

__all__ = ["ContextParallelismConfig", "LongMoEPlugin"]
