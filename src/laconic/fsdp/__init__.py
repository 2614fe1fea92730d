"""FSDP2: few bits in the reduce-scatter of gradients and in the all-gather of parameters."""
