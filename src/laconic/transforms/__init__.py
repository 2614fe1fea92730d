"""Transforms of a model's training."""
