"""World of a deployment over processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from laconic.comm.torch_comm import TorchComm
from laconic.core.errors import AttachError

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_world(timeout_s: float, deployment: object) -> tuple[TorchComm, Callable[[], None]]:
    joined = not dist.is_initialized()
    if joined:
        missing = [name for name in NEEDED if name not in os.environ]
        if missing:
            raise AttachError(
                f"{deployment!r} runs in several processes, but {missing[0]} is not set: start the script"
                " with torchrun --nproc-per-node N script.py, or use 'single' or 'local(replicas=N)'"
            )
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    comm = TorchComm.own(timeout=timedelta(seconds=timeout_s))

    def close() -> None:
        comm.close()
        if joined and dist.is_initialized():
            dist.destroy_process_group()

    return comm, close


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
