"""Transforms of a model's training: their protocol, and the selection of layers."""
