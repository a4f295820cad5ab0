"""Sizes as people write them ("64MiB", "1.5 GB", 4096) and back."""

from __future__ import annotations

import re

__all__ = ["TooSmall", "format_bytes", "format_tokens", "parse_bytes", "parse_tokens"]


class TooSmall(ValueError):
    """A budget is below the least that a schedule can work with; the message says what would do."""


_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str, argument: str = "size") -> int:
    """
    Bytes as an integer.

    Arguments:
        size: an integer number of bytes, or a string with a unit: B, KiB, MiB, GiB, TiB (powers of 1024) or KB, MB,
            GB, TB (powers of 1000). Case does not matter.
        argument: the name that an error message gives.

    Raises:
        `ValueError`: `size` is not a size, or not positive.

    ```py
    >>> parse_bytes("64MiB")
    67108864

    ```
    """
    if isinstance(size, int) and not isinstance(size, bool):
        number = size
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size)) and match[2].upper() in _UNITS:
        number = int(float(match[1]) * _UNITS[match[2].upper()])
    else:
        raise ValueError(f'{argument}={size!r} is not a size; write bytes as an integer or as "64MiB", "1.5GiB".')
    if number <= 0:
        raise ValueError(f'{argument}={size!r} must be positive; write bytes as an integer or as "64MiB", "1.5GiB".')
    return number


def format_bytes(number: float) -> str:
    """
    Bytes for people: `format_bytes(67108864)` is `"64 MiB"`, with at most two digits after the point.

    ```py
    >>> format_bytes(1_610_612_736)
    '1.5 GiB'

    ```
    """
    power = 0
    while abs(number) >= 1024 and power < 4:
        number /= 1024
        power += 1
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    digits = 0 if unit == "B" or abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    text = f"{number:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


_TOKENS = {"": 1, "K": 2**10, "M": 2**20}


def parse_tokens(number: int | str, argument: str = "seq_len") -> int:
    """
    Tokens as an integer.

    Arguments:
        number: an integer, or as people write context lengths: `"128k"` is 131,072, `"1M"` is 1,048,576.
        argument: the name that an error message gives.

    Raises:
        `ValueError`: not such a number, or not positive.

    ```py
    >>> parse_tokens("64k")
    65536

    ```
    """
    match = _SIZE.fullmatch(str(number).replace("_", "").replace(",", ""))
    if match and not isinstance(number, bool) and match[2].upper() in _TOKENS:
        found = float(match[1]) * _TOKENS[match[2].upper()]
        if found == int(found) and 0 < found <= 2**40:
            return int(found)
    raise ValueError(f'{argument}={number!r} is not a number of tokens; write 65536, "64k" or "1M".')


def format_tokens(number: int) -> str:
    """
    Tokens for people, never more than `number`.

    ```py
    >>> format_tokens(1_048_576), format_tokens(786_432), format_tokens(1000)
    ('1M', '768k', '1000')

    ```
    """
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if number >= size and not number % size:
            return f"{number // size}{unit}"
    return str(number) if number < 2**10 else f"{number // 2**10}k"
