"""Pairs: an independent process group for each pair of a worker and a server."""

from __future__ import annotations

from collections.abc import Iterable

from laconic.comm.comm import Comm
from laconic.comm.naming import in_store
from laconic.comm.torch_comm import TorchComm

SERVER, WORKER = 0, 1


def connect(world: Comm, servers: Iterable[int], workers: Iterable[int]) -> dict[int, Comm]:
    """Return this rank's pairs. Called by all ranks; ordering workers, then servers, avoids deadlocks."""
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


def disconnect(pair: Comm) -> None:
    if isinstance(pair, TorchComm):
        pair.close()
