"""Exchange: the life of a gradient, route by route. Knows nothing of DistributedDataParallel."""
