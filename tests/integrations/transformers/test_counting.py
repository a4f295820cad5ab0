"""Which depths a count is of."""

import pytest

from benchmarks.families import small_config
from hf_longmoe import Layout
from hf_longmoe.integrations.transformers.counting import _bends
from hf_longmoe.integrations.transformers.fake_step import fake_moments


@pytest.mark.parametrize(("family", "depths", "bent"), [("gemma4", (2, 4, 6), True), ("mixtral", (1, 2, 3), False)])
def test_the_smallest_depths_are_taken_where_a_third_is_on_their_line(family, depths, bent):
    config, layout = small_config(family), Layout(seq_len=512)
    first, second, third = (fake_moments(config, layout, [512], depth=depth)[0] for depth in depths)
    assert _bends(first, second, third) == bent
    assert not _bends(third, third, third)
