"""Gossip: ranks average their models with those of a few peers; one file a strategy."""
