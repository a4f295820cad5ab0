"""TRL: `LongMoESFTTrainer`, `LongMoEDPOTrainer`, `LongMoETRLMixin`, `bound_head`."""

from hf_longmoe.integrations.trl.versions import check_trl

check_trl()  # first: without TRL the imports below fail on its name alone

from hf_longmoe.integrations.trl.head import bound_head  # noqa: E402
from hf_longmoe.integrations.trl.trainers import (  # noqa: E402
    LongMoEDPOTrainer,
    LongMoESFTTrainer,
    LongMoETRLMixin,
)

__all__ = ["LongMoEDPOTrainer", "LongMoESFTTrainer", "LongMoETRLMixin", "bound_head"]
