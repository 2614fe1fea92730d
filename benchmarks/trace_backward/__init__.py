"""Trace of the files that one backward pass runs."""
