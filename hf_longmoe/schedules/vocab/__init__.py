"""The vocabulary projection: logits, their loss and all gradients in the memory of one tile. See the README here."""

from hf_longmoe.schedules.vocab.logits import LogitTransform
from hf_longmoe.schedules.vocab.ring import ring_cross_entropy
from hf_longmoe.schedules.vocab.ring_plan import ring_beside_bytes, ring_bytes, ring_tile
from hf_longmoe.schedules.vocab.rows import beside_bytes, tile_bytes, tile_rows
from hf_longmoe.schedules.vocab.statistics import TokenStatistics
from hf_longmoe.schedules.vocab.tiles import linear_cross_entropy, token_log_probs, token_statistics

__all__ = [
    "LogitTransform",
    "TokenStatistics",
    "beside_bytes",
    "linear_cross_entropy",
    "ring_beside_bytes",
    "ring_bytes",
    "ring_cross_entropy",
    "ring_tile",
    "tile_bytes",
    "tile_rows",
    "token_log_probs",
    "token_statistics",
]
