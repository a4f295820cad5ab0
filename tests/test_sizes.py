"""Numbers of tokens as people write them, and back."""

import pytest

from hf_longmoe.sizes import format_tokens, parse_tokens


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (65536, 65536),
        ("65536", 65536),
        ("64k", 65536),
        ("64 K", 65536),
        ("1M", 1_048_576),
        ("1.5k", 1536),
        ("1_000", 1000),
        ("131,072", 131_072),
        ("12M", 12 * 2**20),
    ],
)
def test_tokens_as_people_write_them(text, number):
    assert parse_tokens(text) == number


@pytest.mark.parametrize(
    "bad",
    ["", "k", "0", 0, -5, "1.5", "99999999999999M", "-4k", "12 parsecs", "64KiB", "64kB", "1e3", True, None, "nan"],
)
def test_bad_numbers_name_the_argument(bad):
    with pytest.raises(ValueError, match=r'^--seq-len=.* is not a number of tokens; write 65536, "64k" or "1M"\.$'):
        parse_tokens(bad, "--seq-len")


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1"), (1000, "1000"), (1024, "1k"), (1536, "1k"), (65536, "64k"), (1_048_576, "1M"), (1_048_577, "1024k")],
)
def test_tokens_for_people(number, text):
    assert format_tokens(number) == text
    assert parse_tokens(text) <= number < parse_tokens(text) + 1024  # what is told fits where the number does
