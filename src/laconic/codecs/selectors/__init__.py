"""Selectors: which entries of a tensor to send; one file a selector."""
