"""Creation of process groups: backends, names, and keys in a store."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

LISTING = threading.RLock()
DESTROY = inspect.unwrap(dist.destroy_process_group).__code__


def in_store(name: str) -> str:
    """Return the prefix of this group's keys: torchrun's store still has the keys from before a restart.

    A store that torchrun does not share is new after each restart; the prefix then has no number.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "False"
    return f"laconic/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if shared else '0'}/{name}"


def backend_of(backends: Mapping[str, str]) -> str:
    """Return the backend of a group like one with these backends by device, which also takes host tensors.

    It is one name if all are the same: torch warns about a list of one.

    >>> backend_of({"cuda": "nccl"}), backend_of({"cpu": "gloo", "cuda": "gloo"})
    ('cpu:gloo,cuda:nccl', 'gloo')
    """
    if "cpu" not in backends and dist.is_gloo_available():
        backends = {"cpu": "gloo", **backends}
    names = {*backends.values()}
    pairs = (f"{device}:{name}" for device, name in backends.items())
    return names.pop() if len(names) == 1 else ",".join(pairs)


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    config = str(dist.get_backend_config(group))  # such as cpu:gloo,cuda:nccl
    return dict(pair.split(":") for pair in config.split(","))


def host_or(device: torch.device, backends: Mapping[str, str]) -> torch.device:
    """Return the host if this group sends from it, to avoid GPU waits."""
    return torch.device("cpu") if "cpu" in backends else device


def wire_device(device: torch.device, backends: Mapping[str, str]) -> torch.device:
    return torch.device("cpu") if backends.get(device.type) == "gloo" else device


@contextmanager
def not_split_off() -> Iterator[None]:
    """Create NCCL communicators inside `with` without splitting those of the default group.

    After `init_process_group(device_id=...)` torch would split them in a collective over all default ranks,
    which hangs (pytorch #129965).
    """
    default = dist.distributed_c10d._get_default_group()
    device = getattr(default, "bound_device_id", None)
    if device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


def named_group(name: str, ranks: list[int], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Return a new process group of this name, created only by its ranks.

    `dist.new_group(..., use_local_synchronization=True)` may reuse a name, and old addresses in the store.
    On gloo an all-reduce waits until all ranks are connected: one that leaves early would disconnect others.
    """
    c10d = dist.distributed_c10d  # `new_group` accepts no name
    store, place = c10d._get_default_store(), ranks.index(dist.get_rank())
    with not_split_off():
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            place,
            ranks,
            dist.Backend(backend),
            store,
            name,  # type: ignore[arg-type]  # its type varies by version
            timeout=timeout,
        )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    if "gloo" in backend:
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"), group=group)
    return group  # type: ignore[no-any-return]


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy a process group, unless the script is destroying all of them.

    `dist.destroy_process_group()` sorts all groups by name, which fails for one destroyed meanwhile.
    """
    if _all_are_being_destroyed():
        return
    with suppress(ValueError, KeyError):  # KeyError: another thread is destroying it
        dist.destroy_process_group(group)


def _all_are_being_destroyed() -> bool:
    """Return whether a thread is in `dist.destroy_process_group()`.

    No variable references a frame: a cycle would keep groups alive.
    """
    return any(_destroys_all(frame) for frame in _current_frames().values())


def _current_frames() -> dict[int, FrameType]:
    """Return every thread's current frame, without a garbage collection meanwhile.

    Before Python 3.13, a collection there may deadlock with another thread (cpython #106883).
    """
    with LISTING:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if enabled:
                gc.enable()


def _destroys_all(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is DESTROY and frame.f_locals.get("group") in (None, dist.GroupMember.WORLD):
            return True
        frame = frame.f_back
    return False
