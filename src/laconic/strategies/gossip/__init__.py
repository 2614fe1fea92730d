"""Gossip: ranks average their models with those of a few peers; one file per strategy."""
