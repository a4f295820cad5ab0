"""The vocabulary projection: logits, their loss and all gradients in the memory of one tile. See the README here."""

from hf_longmoe.schedules.vocab.logits import LogitTransform
from hf_longmoe.schedules.vocab.rows import beside_bytes, tile_bytes, tile_rows
from hf_longmoe.schedules.vocab.statistics import TokenStatistics
from hf_longmoe.schedules.vocab.tiles import linear_cross_entropy, token_log_probs

__all__ = [
    "LogitTransform",
    "TokenStatistics",
    "beside_bytes",
    "linear_cross_entropy",
    "tile_bytes",
    "tile_rows",
    "token_log_probs",
]
