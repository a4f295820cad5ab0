"""The formulas, against the paper's figures and by hand."""

import pytest

from hf_longmoe.planner import LayerParameters, Layout, ModelShape
from hf_longmoe.planner.closed_forms import (
    boundaries_held,
    boundary_bytes,
    exchange_bytes,
    model_state_bytes,
    offloaded_state_bytes,
    received_rows,
    resident,
    staging_bytes,
    vocab_bytes,
)

GIB = 2**30


@pytest.mark.parametrize(("tokens", "paper"), [(16_384, 42.462), (32_768, 79.521)])
def test_the_papers_vocabulary_peaks(tokens, paper):
    assert vocab_bytes(tokens, 200_000, 7168) / GIB == pytest.approx(paper, rel=0.01)


def test_the_vocabulary_peak_by_hand():
    # 3 rows of 2, 4 of 2, and three of 4 x 3 logits.
    assert vocab_bytes(4, 3, 2) == 4 * (6 + 8 + 36)
    assert vocab_bytes(4, 3, 2, itemsize=2) == 2 * (6 + 8 + 36)


def test_the_papers_boundary_and_how_many_the_host_holds():
    # 556,432 tokens, divided over 8 ranks: 69,554 of each; H 2,880, bfloat16.
    one = boundary_bytes(556_432 // 8, 2880, 2)
    assert one == 69_554 * 5760 and one / GIB == pytest.approx(0.3735, rel=0.01)
    assert [boundaries_held(size * GIB, one, 47) for size in (8, 16, 64)] == [21, 42, 47]
    assert boundaries_held(None, one, 47) == 47 and boundaries_held(one - 1, one, 47) == 0


def test_the_papers_staging():
    assert staging_bytes(142_076_000, 2) / GIB == pytest.approx(4.234, rel=0.001)


def test_model_state_with_and_without_offloading():
    # Theta / W: 16 bytes an element, of which the weight and its gradient in bfloat16 stay.
    assert model_state_bytes(120_000, 8) == 240_000 and offloaded_state_bytes(120_000, 8) == 60_000


def test_exchanged_rows():
    assert received_rows(10, 4) == 40 and received_rows(10, 4, 1.3) == 52
    assert received_rows(3, 1, 1.3) == 4  # whole rows
    # 40 rows sent and 52 received of 16 elements, each on the way there and on the way back.
    assert exchange_bytes(40, 52, 16, 2) == 2 * 40 * 32 + 2 * 52 * 32


# -- what a rank keeps -----------------------------------------------------------------------------------------------
def shape(tied=False):
    """Two layers: 8 parameters of a dense one, and 8 with 64 of experts. Embedding and head: 40 each."""
    dense = LayerParameters(attention=4, norms=1, dense=3)
    sparse = LayerParameters(attention=4, norms=1, router=3, experts=64)
    heads = dict(heads=2, kv_heads=1, head_dim=2, value_dim=2)
    return ModelShape(
        model_type="tiny",
        hidden=4,
        vocab=10,
        layers=(dense, sparse),
        embedding=40,
        head=0 if tied else 40,
        final_norm=4,
        other=0,
        wide=(0, 0),
        largest_parameter=64,
        experts=8,
        top_k=2,
        tied=tied,
        **heads,
    )


def test_one_rank_keeps_all():
    found = resident(shape(), Layout(seq_len=8))
    assert found.elements == found.counted == 164
    assert (found.parameters, found.gradients, found.moments) == (328, 328, 656)
    assert found.gathered_layer == found.gathered_head == 0


def test_everything_is_divided_by_fsdp():
    found = resident(shape(), Layout(seq_len=8, world_size=4))
    assert found.elements == 100 // 4 + 64 // 4 and found.counted == 164
    assert (found.gathered_layer, found.gathered_head) == (72 * 2, 80)  # the layer with experts, whole
    assert resident(shape(), Layout(seq_len=8, world_size=4, fsdp_size=1)).elements == 164


@pytest.mark.parametrize(
    ("ranks", "elements", "gathered"),
    [
        # experts of a rank: 64 / 8; others: 100 / 8 rounded up; of a layer, what is no expert is gathered
        (dict(world_size=8, ep_size=8), 13 + 8, 8),
        # 16 ranks share 64 parameters of experts; the two that have the same experts gather 8 of them
        (dict(world_size=16, ep_size=8), 7 + 4, 8 + 8),
        # only experts are divided
        (dict(world_size=8, ep_size=8, fsdp_size=1), 100 + 8, 0),
    ],
)
def test_experts_are_divided_by_the_larger(ranks, elements, gathered):
    found = resident(shape(), Layout(seq_len=8, **ranks))
    assert (found.elements, found.gathered_layer) == (elements, 2 * gathered)
    assert found.counted == 100 + 64 // 8


def test_kept_in_float32_and_gathered_in_bfloat16():
    kept = resident(shape(), Layout(seq_len=8, world_size=4, parameter_dtype="float32"))
    assert kept.elements == 41 and (kept.parameters, kept.gradients, kept.moments) == (164, 164, 328)
    assert kept.gathered_layer == 72 * 2 and kept.gathered_head == 80


def test_a_tied_head_is_the_embedding():
    assert resident(shape(tied=True), Layout(seq_len=8, world_size=4)).gathered_head == 80
