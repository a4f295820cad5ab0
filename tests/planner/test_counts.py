"""`Counts`: exact where bytes are affine, a parabola, or a chain of two lines; the real depth; several sequences."""

import pytest

from hf_longmoe.peaks.ledger import Moment
from hf_longmoe.planner import Counts

LENGTHS = (1024, 4096, 16384, 32768)
KEY = ("backward", "layer")


def counts(bytes_of, *, depth=10, depths=(1, 2), lengths=LENGTHS):
    """bytes_of: (layers, tokens) -> bytes of `layer` while it is highest."""

    def moments(layers, tokens):
        levels = {"layer": bytes_of(layers, tokens)}
        return {KEY: Moment(levels, {"layer": levels})}

    return Counts(depth, depths, lengths, [[moments(d, n) for n in lengths] for d in depths])


def at(found, length, sequences=1):
    moment = found.at(length, sequences)[KEY]
    assert moment.levels["layer"] == moment.highs
    return moment.highs["layer"]


@pytest.mark.parametrize("length", [17, 1024, 3000, 16384, 100_000, 1_048_576])
def test_affine_in_layers_and_tokens(length):
    def line(layers, tokens):
        return 7000 * layers + 500 + 12 * tokens + 3 * layers * tokens

    found = counts(line)
    assert not found.bent and at(found, length) == line(10, length)
    assert at(found, length, 3) == line(10, 3 * length)
    assert at(counts(line, lengths=(2048, 32768)), length) == line(10, length)


@pytest.mark.parametrize("length", [2048, 16384, 50_000, 1_048_576])
def test_a_parabola(length):
    def bytes_of(layers, tokens):
        return layers * (900 + 40 * tokens + tokens * tokens // 64)

    found = counts(bytes_of)
    assert found.bent and at(found, length) == pytest.approx(bytes_of(10, length), rel=1e-9)
    # Sequences do not see each other.
    own = bytes_of(10, length) - 9000
    assert at(found, length, 5) == pytest.approx(5 * own + 9000, rel=1e-9)


@pytest.mark.parametrize("length", [1024, 2000, 4096, 16384, 60_000, 1_048_576])
def test_a_chain_of_two_lines_that_meet_at_a_counted_length(length):
    def chain(layers, tokens):
        return layers * max(4096 * 100, 100 * tokens) + 5

    found = counts(chain)
    assert not found.bent and at(found, length) == chain(10, length)


@pytest.mark.parametrize(("length", "sequences"), [(1024, 2), (1024, 64), (2048, 32), (8192, 4)])
def test_where_a_chain_bends_all_tokens_count(length, sequences):
    def chain(layers, tokens):
        return max(4096 * 100, 100 * tokens)

    assert at(counts(chain), length, sequences) == chain(10, length * sequences)


def test_a_single_depth_is_the_real_one():
    assert at(counts(lambda layers, tokens: 3 * tokens, depth=2, depths=(2,)), 5000) == 15_000


def test_depths_a_period_of_layers_apart():
    def line(layers, tokens):
        return layers * 1000 + tokens

    assert at(counts(line, depth=9, depths=(3, 5)), 2048) == line(9, 2048)


def test_never_below_zero_nor_above_the_highest():
    falls = counts(lambda layers, tokens: 200_000 - tokens)
    assert at(falls, 150_000) == 50_000 and at(falls, 1_048_576) == 0

    def moment(tokens, level):
        return {KEY: Moment({"layer": 1000 + tokens}, {"layer": {"layer": level}})}

    steep = Counts(2, (2,), (1024, 4096), [[moment(1024, 0), moment(4096, 5096)]])
    found = steep.at(8192)[KEY]
    assert found.levels["layer"] == found.highs == {"layer": 9192}


def test_what_the_smaller_depth_has_not_stays_as_it_is():
    """Of a candidate that one depth lacks nothing can be said but what the other shows."""
    one = {("forward", "layer"): Moment({"layer": 8}, {"layer": {"layer": 8}})}
    both = one | {KEY: Moment({"layer": 500}, {"layer": {"layer": 500}})}
    found = Counts(9, (1, 2), (1024, 4096), [[one, one], [both, both]])
    assert at(found, 2048) == 500
