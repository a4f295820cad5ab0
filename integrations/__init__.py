"""Glue to host libraries: one subpackage a library, and the only place that imports it."""
