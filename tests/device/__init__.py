"""Tests on a stand-in for a GPU. They run in a process of their own: `python -m pytest tests/device`."""
