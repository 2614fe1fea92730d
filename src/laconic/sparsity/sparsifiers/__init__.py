"""Sparsifiers by name: one file a paper."""
