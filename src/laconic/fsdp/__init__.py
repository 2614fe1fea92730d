"""Compression for FSDP2: the reduce-scatter of gradients and the all-gather of parameters."""
