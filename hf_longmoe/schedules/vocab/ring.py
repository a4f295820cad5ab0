"""
Ring-DTP: the vocabulary projection with neither full logits nor the full weight on any rank.

Each rank has tokens of its own and a part of the vocabulary. Either the tokens' hidden states travel round the ring
and meet every part of the weight, or the parts of the weight travel and meet every token (of ranks that have the same
tokens, see `ring_sums.py`):

    hop 0      own tile x own part               while the tile is being sent on
    hop k      the tile from k ranks back        what it has gathered so far arrives one hop behind it, and goes on
    hop P      what a tile has gathered is back home

Forward gathers statistics (tokens) or nothing (weights); backward computes the logits once more and gathers gradients,
in float32 at least: 8·T·V·H operations. Where the weight is frozen, one pass gathers both, at 4·T·V·H (see
`ring_frozen.py`). What travels does so in tiles of the budget, and so does what stays: neither
the number of tokens nor that of the vocabulary is in the peak. Follows arXiv 2609.14306, whose strip grows with the
tokens.
"""

from __future__ import annotations

import zlib

import torch

from hf_longmoe.schedules.vocab.checks import check_num_items, check_objective, flatten_tokens
from hf_longmoe.schedules.vocab.fold import Objective
from hf_longmoe.schedules.vocab.head import operand_dtype
from hf_longmoe.schedules.vocab.logits import LogitTransform
from hf_longmoe.schedules.vocab.ring_hops import RingCall
from hf_longmoe.schedules.vocab.ring_loss import RingLoss
from hf_longmoe.schedules.vocab.ring_plan import TRAVELS, RingPlan, choose_travel, ring_tile
from hf_longmoe.schedules.wire import Wire

__all__ = ["ring_cross_entropy"]

_NO_TRANSFORM = LogitTransform()


@torch.compiler.disable(reason="the ring reads the numbers of valid labels")
def ring_cross_entropy(
    hidden: torch.Tensor,
    shard: torch.Tensor,
    labels: torch.Tensor,
    *,
    wire: Wire,
    bias: torch.Tensor | None = None,
    budget: int | str,
    travel: str = "auto",
    same_tokens: bool = False,
    ignore_index: int = -100,
    num_items: int | float | torch.Tensor | None = None,
    transform: LogitTransform = _NO_TRANSFORM,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weight_scale: float = 1.0,
) -> torch.Tensor:
    """
    [`linear_cross_entropy`] of this rank's tokens with a weight that is divided over the ranks, exact.

    Every rank of the wire must call it, and its backward, also one without tokens or without a part of the weight.
    Beside `budget` and gradients it holds 12 bytes a valid token from forward to backward (24 in float64; none with a
    frozen head), and 4 if some labels are ignored; in half precision, the gradients in float32 until they are cast.

    Arguments:
        hidden (`torch.Tensor`): [..., H], this rank's tokens.
        shard (`torch.Tensor`): [v, H], this rank's rows of the weight; the rows of rank 0 come first, and so on.
        labels (`torch.Tensor`): [...], integers, already shifted, of the whole vocabulary.
        wire (`Wire`): to the ranks.
        bias (`torch.Tensor`, *optional*): [v], this rank's part.
        budget (`int` or `str`): bytes of logits, of tiles that travel, and of all that is made from them.
        travel (`str`, defaults to `"auto"`): `"tokens"`, `"weights"`, or whichever sends less.
        same_tokens (`bool`, defaults to `False`): all ranks have the same tokens (tensor parallelism). Then nothing
            travels but sums, every rank has the same loss and the same gradient of `hidden`, and `weight_scale` is
            no use.
        num_items (`int`, `float` or `torch.Tensor`, *optional*): what this rank's sum is divided by; the number of its
            valid tokens if not given.
        weight_scale (`float`, defaults to 1.0): factor of the gradients of `shard` and `bias`, which are of the sum of
            all ranks' losses; 1 / (number of ranks) for that of the mean.
        ignore_index, transform, label_smoothing, z_loss: as in [`linear_cross_entropy`].

    Returns:
        This rank's loss, a scalar of float32 (float64 for float64 operands); zero if none of its tokens is valid.

    Raises:
        `ValueError`: shapes or dtypes that do not fit or differ between ranks, a label outside of the vocabulary on
            any rank (then on every rank), an unknown `travel`, or a budget below one block.
        `RuntimeError`: in backward, with `create_graph=True`.
        `PeerError`: another rank failed.
    """
    with wire.together():
        if travel not in TRAVELS:
            raise ValueError(f"travel={travel!r} is unknown; choose one of {', '.join(TRAVELS)}.")
        hidden, labels, _ = flatten_tokens(hidden, shard, labels, bias)
        check_objective(label_smoothing, z_loss)
        check_num_items(num_items)
        dtype = operand_dtype(hidden, shard, bias)
        tile = ring_tile(budget, shard.shape[1], dtype=dtype, keep_logits=transform.softcap is not None)
        needs = tuple(
            torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (hidden, shard, bias)
        )
        valid = labels != ignore_index
        terms = {
            "transform, label_smoothing or z_loss (as a checksum)": zlib.crc32(
                repr((transform, float(label_smoothing), float(z_loss))).encode()
            ),
            "vocab.budget (as entries of a block)": tile,
            "travel": TRAVELS.index(travel),
            "same_tokens": int(same_tokens),
            "the hidden size": shard.shape[1],
            "bytes of a number in the products": dtype.itemsize,
            "whether hidden states need a gradient": int(needs[0]),
            "whether the weight needs a gradient": int(needs[1]),
            "whether there is a bias": int(bias is not None),
            "whether the bias needs a gradient": int(needs[2]),
        }
        found = _gather(wire, labels, valid, [*terms.values(), shard.shape[0]])
    tokens, entries = _agree(list(terms), found)
    if same_tokens and len(set(tokens)) > 1:
        raise ValueError(f"same_tokens=True, but the ranks have {tokens} tokens with labels. Give all the same batch.")
    count, index = tokens[wire.rank], None
    if count != len(labels):
        index = torch.nonzero_static(valid, size=count).flatten().int()
    del valid
    with wire.together():
        items = _items(num_items, count, hidden.device)
    objective = Objective(vocab_size=sum(entries), transform=transform, label_smoothing=label_smoothing, z_loss=z_loss)
    one_pass = needs == (True, False, False) and not (label_smoothing and transform.softcap is not None)
    if same_tokens:
        one_pass, travel = False, "sums"
    elif travel == "auto":
        travel = choose_travel(sum(tokens), sum(entries), wire.size, dtype, needs, one_pass)
    plan = RingPlan(tuple(tokens), tuple(entries), travel, tile)
    call = RingCall(
        wire=wire,
        plan=plan,
        objective=objective,
        index=index,
        labels=labels,
        items=items,
        dtype=dtype,
        needs=needs,
        one_pass=one_pass,
        weight_scale=weight_scale,
    )
    return RingLoss.apply(hidden, shard, bias, call)


def _gather(wire: Wire, labels: torch.Tensor, valid: torch.Tensor, numbers: list[int]) -> list[list[int]]:
    """[*numbers, valid labels, the smallest, the largest] of every rank: the only host synchronisation."""
    header = torch.tensor(numbers, dtype=torch.int64, device=labels.device)
    if labels.numel():
        inside = torch.where(valid, labels, 0)
        mine = torch.stack([valid.sum(), inside.amin(), inside.amax()])
    else:
        mine = header.new_zeros(3)
    return wire.gather(torch.cat([header, mine.long()]))


def _agree(terms: list[str], found: list[list[int]]) -> tuple[list[int], list[int]]:
    """Valid tokens, and vocabulary entries, of every rank. What is wrong is refused on every rank alike."""
    for name, values in zip(terms, zip(*found, strict=True), strict=False):
        if len(set(values)) > 1:
            raise ValueError(f"The ranks of the ring differ in {name}: {list(values)}. Give every rank the same.")
    entries, tokens, smallest, largest = zip(*(row[len(terms) :] for row in found), strict=True)
    vocab_size = sum(entries)
    for rank, (low, high) in enumerate(zip(smallest, largest, strict=True)):
        wrong = low if low < 0 else high
        if not 0 <= wrong < max(vocab_size, 1):
            raise ValueError(
                f"labels of rank {rank} of the ring contain {wrong}, outside the vocabulary [0, {vocab_size}); use"
                " ignore_index to leave tokens out."
            )
    return list(tokens), list(entries)


def _items(num_items: int | float | torch.Tensor | None, count: int, device: torch.device) -> float | torch.Tensor:
    if count == 0:
        return 1.0  # the sum is zero, whatever it is divided by
    if num_items is None:
        return float(count)
    if isinstance(num_items, torch.Tensor):
        return num_items.detach().reshape(()).to(device)
    if num_items == 0:
        raise ValueError(f"num_items=0, but {count} tokens have labels; give the number of tokens.")
    return num_items
