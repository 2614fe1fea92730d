"""Codings for the boundary between two pipeline stages: one file per name."""
