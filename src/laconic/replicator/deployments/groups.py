"""Groups: replicas in step inside a group, groups at their own pace, parameters on servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from laconic.comm.comm import Comm
from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.replicator.deployment import Deployment, Seat, Terms
from laconic.replicator.servers.calls import Call, Kind, send
from laconic.replicator.servers.pairs import SERVER, closed, paired
from laconic.replicator.servers.serving import heartbeats, serve
from laconic.replicator.world import local_rank, opened

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Groups(Deployment):
    """Sync inside, async between: a group pushes its mean gradient and pulls what all have made of it.

    The first `servers` ranks hold the parameters, as `asynchronous` says; the others form groups of `size`
    consecutive ranks. A group that loses a rank ends, and the others go on.

    Args:
        size: Replicas in a group, 1 or more; default: 2.
        servers: Ranks that hold parameters and train nothing, 1 or more; default: 1.
        staleness: The most updates of others between a gradient's parameters and its application, 0 or more;
            an older one is refused; default: 16.

    Raises:
        SpecError: An argument is out of range.
    """

    size: int = 2
    servers: int = 1
    staleness: int = 16

    def __post_init__(self) -> None:
        arguments.whole(f"{self.name}: size", self.size, 1)
        arguments.whole(f"{self.name}: servers", self.servers, 1)
        arguments.whole(f"{self.name}: staleness", self.staleness, 0)

    def launch(self, play: Callable[[Seat], T], terms: Terms) -> list[T]:
        return served(self, self.size, self.servers, self.staleness, play, terms)


def served(
    deployment: Deployment,
    size: int,
    servers: int,
    staleness: int,
    play: Callable[[Seat], T],
    terms: Terms,
) -> list[T]:
    """Serve on the first ranks of torchrun, and play a replica on each of the others."""
    world, close = opened(terms.timeout_s, deployment)
    try:
        workers = world.size - servers
        if workers < size or workers % size:
            more = servers + size * max(1, -(-workers // size))
            raise SpecError(
                f"{deployment!r} has {servers} server{'s' if servers > 1 else ''} and groups of {size}, which"
                f" {world.size} ranks do not make: start {more} ranks"
            )
        return serve_or_play(world, size, servers, staleness, play, terms)
    finally:
        close()


def place(rank: int, servers: int) -> int:
    """A replica's number on its machine, where the first ranks of all are servers, which need no device."""
    first = rank - local_rank()
    return local_rank() - max(0, servers - first)


def serve_or_play(
    world: Comm, size: int, servers: int, staleness: int, play: Callable[[Seat], T], terms: Terms
) -> list[T]:
    """The part of this rank of the world: nothing from a server, its result from a replica."""
    is_server, number = world.rank < servers, (world.rank - servers) // size
    group = world.split(world.size if is_server else number)
    pairs = paired(world, range(servers), range(servers, world.size, size))
    if is_server:
        serve(pairs, world, terms, staleness)
        return []
    beats = heartbeats(world)
    try:
        seat = Seat(
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
            send(pair, SERVER, Call(Kind.BYE))
        return [result]
    finally:
        if beats is not None:
            beats.close()
        for pair in pairs.values():
            closed(pair)
