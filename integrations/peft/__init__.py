"""PEFT: adapters on what `patch_model` bounds. See the README here."""

from hf_longmoe.integrations.peft.versions import check_peft

check_peft()  # first: with an old PEFT the imports below fail on whatever name it lacks

from hf_longmoe.integrations.peft.experts import (  # noqa: E402
    ExpertAdapters,
    adapter_state_dict,
    expert_adapters,
    shard_adapters,
)
from hf_longmoe.integrations.peft.heads import HeadAdapters, head_adapters  # noqa: E402

__all__ = [
    "ExpertAdapters",
    "HeadAdapters",
    "adapter_state_dict",
    "expert_adapters",
    "head_adapters",
    "shard_adapters",
]
