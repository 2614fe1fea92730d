"""Comm: the only door to other ranks."""
