"""The routers' auxiliary loss, streamed: exact, from [E] sums a layer. See the README here."""

from hf_longmoe.schedules.aux.load_balancing import RouterSums, load_balancing_loss, router_sums
from hf_longmoe.schedules.aux.over_ranks import sums_over_ranks

__all__ = ["RouterSums", "load_balancing_loss", "router_sums", "sums_over_ranks"]
