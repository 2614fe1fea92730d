"""Core: specs, the codec and selector contracts, layouts, keys, errors. Imports no other package."""
