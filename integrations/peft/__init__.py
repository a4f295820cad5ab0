"""PEFT: adapters on what `patch_model` bounds. See the README here."""

from hf_longmoe.integrations.peft.versions import check_peft

check_peft()  # first: with an old PEFT the imports below fail on whatever name it lacks

from hf_longmoe.integrations.peft.experts import ExpertAdapters, expert_adapters, shard_adapters  # noqa: E402
from hf_longmoe.integrations.peft.heads import HeadAdapters, head_adapters  # noqa: E402

__all__ = ["ExpertAdapters", "HeadAdapters", "expert_adapters", "head_adapters", "shard_adapters"]
