"""A hint for a misspelt name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest_hint"]


def nearest_hint(name: object, known: Iterable[str]) -> str:
    """
    What an error message about an unknown `name` adds, with a space before it; empty where none of `known` is near.

    ```py
    >>> nearest_hint("dispach", ("dispatch", "vocab"))
    " Did you mean 'dispatch'?"

    ```
    """
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
