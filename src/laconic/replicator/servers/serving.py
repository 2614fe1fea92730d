"""Serving: what a server does from beginning to end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist

from laconic.comm.at_exit import start_thread
from laconic.comm.comm import Comm
from laconic.comm.naming import in_store
from laconic.comm.torch_comm import TorchComm
from laconic.core.errors import LaconicError, PeerError, WireError
from laconic.replicator.deployment import Terms
from laconic.replicator.servers.calls import Call, Kind, receive, send
from laconic.replicator.servers.pairs import WORKER, closed
from laconic.replicator.servers.share import Share, read_floats
from laconic.strategies.membership.heartbeats import Heartbeats

log = logging.getLogger("laconic")
LOOK_S = 0.5  # between two looks at who is alive
GRACE_S = 1.0  # for workers that have failed
BEATS = "replicator"


def heartbeats(world: Comm) -> Heartbeats | None:
    """This rank's heartbeat, where ranks are processes; called by every rank that serves or is served."""
    if not isinstance(world, TorchComm):
        return None
    store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
    return Heartbeats.of(store, f"{in_store(world.group.group_name)}/{BEATS}", world.rank, world.size)


def file_of(folder: Path | None, name: str, server: int) -> Path | None:
    """Where a server keeps its share of this optimiser."""
    return None if folder is None else folder / f"{name}-server{server}.pt"


class Service:
    """All shares of one server, and who still works with them."""

    def __init__(self, server: int, terms: Terms, limit: int) -> None:
        self.server, self.terms, self.limit = server, terms, limit
        self.shares: dict[str, Share] = {}
        self.lost: dict[int, str] = {}
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def attend(self, worker: int, pair: Comm) -> None:
        """Answer a worker until it says goodbye or is lost."""
        opened: dict[int, Share] = {}
        try:
            while (call := receive(pair, WORKER)).kind != Kind.BYE:
                try:
                    answer = self._answer(call, opened)
                except LaconicError as error:
                    answer = Call(Kind.ERROR, told=str(error))
                send(pair, WORKER, answer)
        except PeerError as error:
            self.lost[worker] = str(error)
            log.warning("server %d: worker %d is lost, and the others go on: %s", self.server, worker, error)
        except BaseException as error:
            self.error = error

    def _answer(self, call: Call, opened: dict[int, Share]) -> Call:
        if call.kind == Kind.OPEN:
            opened[call.number] = self._opened(call)
        if call.number not in opened:
            raise WireError(f"no optimiser {call.number} was opened here")
        share = opened[call.number]
        with share.lock:
            staleness: int | None = 0
            if call.kind == Kind.PUSH:
                assert call.tensors is not None
                groups, step = call.told
                staleness = share.push(groups, call.version, call.tensors, step)
            kind = Kind.REFUSED if staleness is None else Kind.APPLIED
            return Call(kind, staleness or 0, share.version, None, share.bytes)

    def _opened(self, call: Call) -> Share:
        """The share that a worker describes: made by the first one, and the same for all others."""
        assert call.tensors is not None
        name = call.told["name"]
        with self._lock:
            if name not in self.shares:
                file = file_of(self.terms.checkpoints, name, self.server)
                initial = read_floats(call.tensors)
                self.shares[name] = Share(call.told, initial, self.limit, file, self.terms.every)
            self.shares[name].check_same(call.told)
            return self.shares[name]

    def save(self) -> None:
        """Write a checkpoint of all shares."""
        for share in self.shares.values():
            with share.lock:
                share.save()


def serve(pairs: Mapping[int, Comm], world: Comm, terms: Terms, limit: int) -> None:
    """Serve these workers until each has said goodbye or is lost. `limit`: the bound on staleness.

    Raises `PeerError` if all were lost. A checkpoint is written in any case.
    """
    service, beats = Service(world.rank, terms, limit), heartbeats(world)
    threads = {
        worker: start_thread(partial(service.attend, worker, pair), f"serves worker {worker}", end=_nothing)
        for worker, pair in pairs.items()
    }
    try:
        wait(service, threads, lambda: None if beats is None else beats.living())
    finally:
        if beats is not None:
            beats.close()
        for pair in pairs.values():
            closed(pair)
        service.save()
    if service.error is not None:
        raise service.error
    if pairs and len(service.lost) == len(pairs):
        time.sleep(GRACE_S)  # their own errors come first, and tell more
        why = next(iter(service.lost.values()))
        raise PeerError(f"server {world.rank}: all {len(pairs)} workers are lost, the first because: {why}")


def wait(
    service: Service, threads: Mapping[int, threading.Thread], living: Callable[[], set[int] | None]
) -> None:
    """Until every worker's thread has ended, or the worker has no heartbeat, or this server has failed."""
    pending = dict(threads)
    while pending and service.error is None:
        alive, deadline = living(), time.monotonic() + LOOK_S
        for worker, thread in list(pending.items()):
            thread.join(max(0.01, deadline - time.monotonic()))
            if not thread.is_alive():
                del pending[worker]
            elif alive is not None and worker not in alive:
                service.lost[worker] = f"worker {worker} has no heartbeat"
                log.warning("server %d: worker %d has no heartbeat, and is left", service.server, worker)
                del pending[worker]


def _nothing() -> None:
    """A thread of a server ends with its worker."""
