"""`laconic.compress` for models under DistributedDataParallel and, through `laconic.fsdp`, FSDP2."""
