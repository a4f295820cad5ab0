"""Axolotl: `LongMoEAxolotlPlugin`, named under `plugins:` in its YAML; `LongMoEArgs`, the keys that it adds."""

from hf_longmoe.integrations.axolotl.versions import check_axolotl

check_axolotl()  # first: without Axolotl the imports below fail on its name alone

from hf_longmoe.integrations.axolotl.args import LongMoEArgs  # noqa: E402
from hf_longmoe.integrations.axolotl.plugin import LongMoEAxolotlPlugin  # noqa: E402

__all__ = ["LongMoEArgs", "LongMoEAxolotlPlugin"]
