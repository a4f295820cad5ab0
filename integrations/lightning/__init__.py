"""Lightning: `LongMoECallback` for its Trainer; `LongMoESchedules` for Fabric."""

from hf_longmoe.integrations.lightning.versions import check_lightning

check_lightning()  # first: without Lightning the imports below fail on its name alone

from hf_longmoe.integrations.lightning.callback import LongMoECallback  # noqa: E402
from hf_longmoe.integrations.lightning.schedules import LightningAdamW, LongMoESchedules  # noqa: E402

__all__ = ["LightningAdamW", "LongMoECallback", "LongMoESchedules"]
