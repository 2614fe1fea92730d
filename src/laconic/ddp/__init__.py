"""DDP: `laconic.compress` on DistributedDataParallel and FSDP2."""
