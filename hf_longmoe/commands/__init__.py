"""The commands of `hf-longmoe`, one a module."""

__all__ = ["UsageError"]


class UsageError(Exception):
    """What was asked cannot be done. The message is one line for the user; the exit code is 2."""
