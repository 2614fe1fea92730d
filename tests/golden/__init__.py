"""Wires of the past, stored: a change of format cannot happen by accident."""
