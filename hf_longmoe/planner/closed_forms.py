"""The four peaks as formulas, and what each rank keeps. Integers only.

T tokens of a rank, k experts a token, H hidden size, V vocabulary, b bytes of an element, W ranks. The paper is
arXiv 2609.14306.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_longmoe.planner.shape import DTYPES, Layout, ModelShape

__all__ = [
    "Resident",
    "boundary_bytes",
    "boundaries_held",
    "exchange_bytes",
    "model_state_bytes",
    "offloaded_state_bytes",
    "received_rows",
    "resident",
    "staging_bytes",
    "vocab_bytes",
]


# -- the paper's forms -----------------------------------------------------------------------------------------------
def vocab_bytes(tokens: int, vocab: int, hidden: int, *, itemsize: int = 4) -> int:
    """
    Forward and backward of projection and cross-entropy, unbounded: V·H + T·H of operands, 3·T·V of logits, their
    log-softmax and their gradient, `itemsize` bytes each (paper, table 2: 42.46 GiB at T 16,384, H 7,168, V 200,000).

    What the probe calls `vocab` in a stock Transformers step is the last part, 12·T·V bytes: the loss is float32.
    """
    return itemsize * (vocab * hidden + tokens * hidden + 3 * tokens * vocab)


def received_rows(tokens: int, top_k: int, imbalance: float = 1.0) -> int:
    """Rows that the fullest rank receives: imbalance · k·T."""
    return math.ceil(imbalance * tokens * top_k)


def exchange_bytes(sent: int, received: int, hidden: int, itemsize: int) -> int:
    """Buffers of a stock expert-parallel call: rows sent and received, on the way there and back, H·b each."""
    return 2 * (sent + received) * hidden * itemsize


def boundary_bytes(tokens: int, hidden: int, itemsize: int) -> int:
    """One checkpoint boundary, T·H·b (paper: 0.3735 GiB for T 69,629, H 2,880, bfloat16)."""
    return tokens * hidden * itemsize


def boundaries_held(host_budget: int | None, each: int, count: int) -> int:
    """How many of `count` boundaries of `each` bytes a host budget holds; all if it is `None`."""
    return count if host_budget is None else min(count, host_budget // each)


def staging_bytes(elements: int, slots: int) -> int:
    """Device memory of a streaming optimizer's step: slots · bucket · 16 (float32 master, moments, gradient)."""
    return slots * elements * 16


def model_state_bytes(parameters: int, ranks: int) -> int:
    """All on the device: weight and gradient in bfloat16, float32 master and both moments: 16·Θ/W."""
    return 16 * parameters // ranks


def offloaded_state_bytes(parameters: int, ranks: int) -> int:
    """What of it stays there with an offloaded optimizer: weight and gradient in bfloat16, 4·Θ/W."""
    return 4 * parameters // ranks


# -- what a rank keeps -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Resident:
    """
    Bytes on one rank.

    Arguments:
        elements: parameters that it keeps.
        parameters, gradients, moments: of those.
        counted: parameters that a fake step of one rank keeps, as a number.
        gathered_layer: FSDP2's whole weights of the largest layer; 0 where nothing is divided.
        gathered_head: of the LM head; where it is tied, of the embedding, all through the step.
    """

    elements: int
    parameters: int
    gradients: int
    moments: int
    counted: int
    gathered_layer: int
    gathered_head: int


def resident(shape: ModelShape, layout: Layout) -> Resident:
    """
    Parameters and what goes with them, divided over the ranks as Transformers' FSDP2 and expert parallelism do.

    Experts are divided over `max(ep_size, fsdp_size)` ranks, all else over `fsdp_size`. Gathered are, of each layer,
    its other weights, and its experts where they are divided beyond `ep_size`.
    """
    experts, ranks = shape.expert_parameters, layout.fsdp_size
    others = shape.parameters - experts
    elements = -(-others // ranks) - (experts // -max(layout.ep_size, ranks))
    kept = DTYPES[layout.parameter_dtype]
    largest = 0
    for layer in shape.layers:
        whole = layer.experts // layout.ep_size if ranks > layout.ep_size or kept != layout.itemsize else 0
        largest = max(largest, layer.total - layer.experts + whole)
    return Resident(
        elements=elements,
        parameters=elements * kept,
        gradients=elements * kept,
        moments=2 * elements * kept,
        counted=others + experts // layout.ep_size,
        gathered_layer=largest * layout.itemsize if ranks > 1 else 0,
        gathered_head=(shape.head or shape.embedding) * layout.itemsize if ranks > 1 else 0,
    )
