"""Pairs: a group of its own for each worker and each server, so that none breaks with another."""

from __future__ import annotations

from collections.abc import Iterable

from laconic.comm.comm import Comm
from laconic.comm.naming import in_store
from laconic.comm.torch_comm import TorchComm

SERVER, WORKER = 0, 1  # ranks in a pair


def paired(world: Comm, servers: Iterable[int], workers: Iterable[int]) -> dict[int, Comm]:
    """For a server its pair with each worker, for a worker that with each server, by the other's rank in the
    world; for others nothing. Called by all ranks of `world`, in which servers come before workers.

    Pairs are made in the order of workers, then servers: so no two ranks wait for each other.
    """
    found: dict[int, Comm] = {}
    for server, worker in ((server, worker) for worker in workers for server in servers):
        mine = world.rank in (server, worker)
        other = server if world.rank == worker else worker
        if not isinstance(world, TorchComm):
            part: Comm = world.split(int(mine))
        elif mine:
            name = f"{in_store(world.group.group_name)}/pair/{server}/{worker}"
            part = TorchComm.among([server, worker], name, like=world)
        if mine:
            found[other] = part
    return found


def closed(pair: Comm) -> None:
    """Leave a pair: the other end, if it waits, is told that this one is gone."""
    if isinstance(pair, TorchComm):
        pair.close()
