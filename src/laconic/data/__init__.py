"""Data: which examples belong to whom."""
