"""How a Trainer counts, batches and scales when ranks share a sequence."""

from __future__ import annotations

__all__ = ["TrainerSequences"]


class TrainerSequences:
    """A mixin of `Trainer`."""
