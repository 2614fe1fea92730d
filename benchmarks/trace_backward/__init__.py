"""Trace of the files that take part in one backward pass."""
