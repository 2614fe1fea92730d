"""Groups: synchronous within a group, asynchronous between groups, with parameters on servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from laconic.comm.comm import Comm
from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import Status
from laconic.replicator.deployment import Deployment, LaunchOptions, RankContext
from laconic.replicator.servers.messages import Message, MessageKind, send
from laconic.replicator.servers.pairs import SERVER, connect, disconnect
from laconic.replicator.servers.serving import heartbeats, serve
from laconic.replicator.world import join_world, local_rank

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Groups(Deployment):
    """Groups that push their mean gradients to servers and pull the updated parameters.

    The first `servers` ranks have the parameters, as in `asynchronous`; the others form groups of `size`
    consecutive ranks. A group ends if it loses a rank; the others continue.

    Args:
        size: Replicas per group, at least 1; default: 2.
        servers: Ranks with parameters and no training, at least 1; default: 1.
        staleness: Most updates of others between a gradient's parameters and its application, at least 0;
            older gradients are rejected; default: 16.

    Raises:
        SpecError: An argument is out of range.
    """

    paper: ClassVar[str] = "Buchlovsky et al. 2019, arXiv:1902.00465"
    status: ClassVar[Status] = "reconstruction"

    size: int = 2
    servers: int = 1
    staleness: int = 16

    def __post_init__(self) -> None:
        arguments.whole(f"{self.name}: size", self.size, 1)
        arguments.whole(f"{self.name}: servers", self.servers, 1)
        arguments.whole(f"{self.name}: staleness", self.staleness, 0)

    def launch(self, play: Callable[[RankContext], T], terms: LaunchOptions) -> list[T]:
        return served(self, self.size, self.servers, self.staleness, play, terms)


def served(
    deployment: Deployment,
    size: int,
    servers: int,
    staleness: int,
    play: Callable[[RankContext], T],
    terms: LaunchOptions,
) -> list[T]:
    world, close = join_world(terms.timeout_s, deployment)
    try:
        workers = world.size - servers
        if workers < size or workers % size:
            more = servers + size * max(1, -(-workers // size))
            raise SpecError(
                f"{deployment!r} has {servers} server{'s' if servers > 1 else ''} and groups of {size}, which"
                f" do not fit {world.size} ranks: start {more} ranks"
            )
        return serve_or_run(world, size, servers, staleness, play, terms)
    finally:
        close()


def place(rank: int, servers: int) -> int:
    """Return a replica's number on its machine, without servers, which need no device."""
    first = rank - local_rank()
    return local_rank() - max(0, servers - first)


def serve_or_run(
    world: Comm,
    size: int,
    servers: int,
    staleness: int,
    play: Callable[[RankContext], T],
    terms: LaunchOptions,
) -> list[T]:
    is_server, number = world.rank < servers, (world.rank - servers) // size
    group = world.split(world.size if is_server else number)
    pairs = connect(world, range(servers), range(servers, world.size, size))
    if is_server:
        serve(pairs, world, terms, staleness)
        return []
    beats = heartbeats(world)
    try:
        seat = RankContext(
            group,
            group=number,
            groups=(world.size - servers) // size,
            served=True,
            servers=[pairs[server] for server in sorted(pairs)],
            server_count=servers,
            staleness=staleness,
            place=place(world.rank, servers),
            terms=terms,
        )
        result = play(seat)
        for pair in seat.servers:
            send(pair, SERVER, Message(MessageKind.BYE))
        return [result]
    finally:
        if beats is not None:
            beats.close()
        for pair in pairs.values():
            disconnect(pair)
