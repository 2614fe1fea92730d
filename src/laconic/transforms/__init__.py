"""Transforms of a model's training: the protocol that all follow, and the selection of layers."""
