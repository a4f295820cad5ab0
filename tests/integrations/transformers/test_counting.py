"""Which depths and lengths a count is of."""

import pytest

from benchmarks.families import small_config
from hf_longmoe import Layout
from hf_longmoe.integrations.transformers.counting import _SHORT, _USUAL, _bends, lengths_for
from hf_longmoe.integrations.transformers.fake_step import fake_moments


@pytest.mark.parametrize(("family", "depths", "bent"), [("gemma4", (2, 4, 6), True), ("mixtral", (1, 2, 3), False)])
def test_the_smallest_depths_are_taken_where_a_third_is_on_their_line(family, depths, bent):
    config, layout = small_config(family), Layout(seq_len=512)
    first, second, third = (fake_moments(config, layout, [512], depth=depth)[0] for depth in depths)
    assert _bends(first, second, third) == bent
    assert not _bends(third, third, third)


@pytest.mark.parametrize(
    ("family", "lengths"),
    [("mixtral", _USUAL), ("nemotron_h", _USUAL), ("qwen3_next", _SHORT), ("kimi_linear", _SHORT)],
)
def test_short_lengths_for_a_model_that_walks_along_the_sequence(family, lengths):
    assert lengths_for(small_config(family), Layout(seq_len=512)) is lengths


@pytest.mark.parametrize("lengths", [_USUAL, _SHORT])
@pytest.mark.parametrize("bent", [False, True])
def test_a_patched_count_begins_at_the_layouts_own_length_where_that_is_shorter(lengths, bent):
    for tokens, first in ((16, 1024), (1500, 1500), (10**6, lengths.kept[0])):
        found = lengths.patched(Layout(seq_len=tokens), bent)
        assert found[0] == first and sorted(set(found)) == list(found)
        assert len(found) >= (4 if bent else 2)
