"""`Layout`: what it gives, and what it refuses."""

import pytest

from hf_longmoe.planner import LayerParameters, Layout, ModelShape


def shape(experts):
    parts = LayerParameters(attention=5, norms=1, router=2, experts=8 if experts else 0, dense=0 if experts else 4)
    sizes = dict(hidden=4, vocab=10, embedding=40, head=40, final_norm=4, other=0, largest_parameter=40)
    heads = dict(heads=2, kv_heads=1, head_dim=2, value_dim=2)
    return ModelShape(model_type="tiny", layers=(parts,) * 3, wide=(0,) * 3, experts=experts, **sizes, **heads)


def test_a_shape_adds_up():
    model = shape(8)
    assert model.parameters == 3 * 16 + 84 and model.expert_parameters == 24
    assert model.depth == 3 and model.sparse == (True,) * 3
    assert shape(0).sparse == (False,) * 3


def test_tokens_of_a_rank():
    layout = Layout(seq_len=1001, micro_batch=2, world_size=8, cp_size=8)
    assert layout.local_seq_len == 126 and layout.tokens == 252
    assert layout.fsdp_size == 8 and layout.imbalance == 1.0
    assert Layout(seq_len=8, world_size=4, ep_size=4, imbalance=4.0).imbalance == 4.0
    assert layout.parameter_dtype == "bfloat16" and layout.itemsize == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(seq_len=0), "seq_len=0 must be a whole number of at least 1"),
        (dict(seq_len=1.5), "seq_len=1.5 must be a whole number"),
        (dict(seq_len=8, world_size=True), "world_size=True must be"),
        (dict(seq_len=8, world_size=8, ep_size=3), r"ep_size=3 does not divide world_size=8; one of \[1, 2, 4, 8\]"),
        (dict(seq_len=8, world_size=8, fsdp_size=16), "fsdp_size=16 does not divide world_size=8"),
        (dict(seq_len=7, world_size=8, cp_size=8), "seq_len=7 is shorter than cp_size=8.*at least 8 tokens"),
        (dict(seq_len=8, dtype="bf16"), "dtype='bf16' is unknown; choose one of bfloat16.*Did you mean 'bfloat16'"),
        (dict(seq_len=8, parameter_dtype="int8"), "parameter_dtype='int8' is unknown"),
        (dict(seq_len=8, imbalance=1.3), r"imbalance=1.3 must be from 1 \(balanced\) to ep_size=1"),
        (dict(seq_len=8, world_size=4, ep_size=4, imbalance=0.9), "imbalance=0.9 must be from 1"),
        (dict(seq_len=8, world_size=4, ep_size=4, imbalance=float("nan")), "imbalance=nan must be from 1"),
        (dict(seq_len=8, optimizer="loop"), "optimizer='loop' is unknown.*Did you mean 'for-loop'"),
        (dict(seq_len=8, checkpointing="on"), "checkpointing='on' is unknown"),
    ],
)
def test_layouts_that_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Layout(**given)


def test_experts_that_cannot_be_divided():
    Layout(seq_len=8, world_size=8, ep_size=8).check(shape(8))
    with pytest.raises(ValueError, match=r"ep_size=8 does not divide the 12 experts of tiny; one of \[1, 2, 4\]"):
        Layout(seq_len=8, world_size=8, ep_size=8).check(shape(12))
    with pytest.raises(ValueError, match="tiny as configured has no experts; give ep_size=1"):
        Layout(seq_len=8, world_size=8, ep_size=8).check(shape(0))
