"""Selectors of the entries of a tensor to send; one file per selector."""
