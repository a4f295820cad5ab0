"""The routers' auxiliary loss, streamed: exact, from [E] sums a layer. See the README here."""

from hf_longmoe.schedules.aux.load_balancing import RouterSums, load_balancing_loss, router_sums

__all__ = ["RouterSums", "load_balancing_loss", "router_sums"]
