"""Exchange of gradients, route by route, independent of DistributedDataParallel."""
