"""Accelerate: `LongMoEPlugin`."""
