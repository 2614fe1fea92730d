"""DDP: `laconic.compress`, for models under DistributedDataParallel and, by `laconic.fsdp`, FSDP2."""
