"""What a Trainer of a model sharded at load saves, and how it goes on from it."""

from __future__ import annotations

__all__ = ["TrainerCheckpoints"]


class TrainerCheckpoints:
    """A mixin of `Trainer`."""
