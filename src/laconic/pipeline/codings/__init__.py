"""Codings for the boundary between two pipeline stages."""
