"""Measure: which component held the most bytes, and when."""
