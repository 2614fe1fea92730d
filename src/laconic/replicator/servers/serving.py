"""Serving: the main loop of a server."""

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
from laconic.replicator.deployment import LaunchOptions
from laconic.replicator.servers.messages import Message, MessageKind, receive, send
from laconic.replicator.servers.pairs import WORKER, disconnect
from laconic.replicator.servers.parameter_shard import ParameterShard, read_floats
from laconic.strategies.membership.heartbeats import Heartbeats

log = logging.getLogger("laconic")
POLL_S = 0.5
GRACE_S = 1.0
BEATS = "replicator"


def heartbeats(world: Comm) -> Heartbeats | None:
    if not isinstance(world, TorchComm):
        return None
    store = dist.distributed_c10d._get_default_store()  # has no public name
    return Heartbeats.of(store, f"{in_store(world.group.group_name)}/{BEATS}", world.rank, world.size)


def file_of(folder: Path | None, name: str, server: int) -> Path | None:
    return None if folder is None else folder / f"{name}-server{server}.pt"


class Service:
    def __init__(self, server: int, terms: LaunchOptions, limit: int) -> None:
        self.server, self.terms, self.limit = server, terms, limit
        self.shares: dict[str, ParameterShard] = {}
        self.lost: dict[int, str] = {}
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def serve_worker(self, worker: int, pair: Comm) -> None:
        join_world: dict[int, ParameterShard] = {}
        try:
            while (call := receive(pair, WORKER)).kind != MessageKind.BYE:
                try:
                    answer = self._answer(call, join_world)
                except LaconicError as error:
                    answer = Message(MessageKind.ERROR, body=str(error))
                send(pair, WORKER, answer)
        except PeerError as error:
            self.lost[worker] = str(error)
            log.warning("server %d: worker %d is lost, the others continue: %s", self.server, worker, error)
        except BaseException as error:
            self.error = error

    def _answer(self, call: Message, join_world: dict[int, ParameterShard]) -> Message:
        if call.kind == MessageKind.OPEN:
            join_world[call.number] = self._open_shard(call)
        if call.number not in join_world:
            raise WireError(f"no optimiser {call.number} was opened here")
        share = join_world[call.number]
        with share.lock:
            staleness: int | None = 0
            if call.kind == MessageKind.PUSH:
                assert call.tensors is not None
                groups, step = call.body
                staleness = share.push(groups, call.version, call.tensors, step)
            kind = MessageKind.REFUSED if staleness is None else MessageKind.APPLIED
            return Message(kind, staleness or 0, share.version, None, share.bytes)

    def _open_shard(self, call: Message) -> ParameterShard:
        assert call.tensors is not None
        name = call.body["name"]
        with self._lock:
            if name not in self.shares:
                file = file_of(self.terms.checkpoints, name, self.server)
                initial = read_floats(call.tensors)
                self.shares[name] = ParameterShard(call.body, initial, self.limit, file, self.terms.every)
            self.shares[name].check_same(call.body)
            return self.shares[name]

    def save(self) -> None:
        for share in self.shares.values():
            with share.lock:
                share.save()


def serve(pairs: Mapping[int, Comm], world: Comm, terms: LaunchOptions, limit: int) -> None:
    """Serve workers until each has said goodbye or is lost. Raises `PeerError` if all were lost."""
    service, beats = Service(world.rank, terms, limit), heartbeats(world)
    threads = {
        worker: start_thread(
            partial(service.serve_worker, worker, pair), f"serves worker {worker}", end=lambda: None
        )
        for worker, pair in pairs.items()
    }
    try:
        wait(service, threads, lambda: None if beats is None else beats.living())
    finally:
        if beats is not None:
            beats.close()
        for pair in pairs.values():
            disconnect(pair)
        service.save()
    if service.error is not None:
        raise service.error
    if pairs and len(service.lost) == len(pairs):
        time.sleep(GRACE_S)  # workers report their errors first
        why = next(iter(service.lost.values()))
        raise PeerError(f"server {world.rank}: all {len(pairs)} workers are lost, the first with: {why}")


def wait(
    service: Service, threads: Mapping[int, threading.Thread], living: Callable[[], set[int] | None]
) -> None:
    pending = dict(threads)
    while pending and service.error is None:
        alive, deadline = living(), time.monotonic() + POLL_S
        for worker, thread in list(pending.items()):
            thread.join(max(0.01, deadline - time.monotonic()))
            if not thread.is_alive():
                del pending[worker]
            elif alive is not None and worker not in alive:
                service.lost[worker] = f"worker {worker} has no heartbeat"
                log.warning("server %d: worker %d has no heartbeat and is dropped", service.server, worker)
                del pending[worker]
