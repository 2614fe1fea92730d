"""Parameter servers in threads: what is pushed is applied once, and what is kept back is not lost."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tests.unit.shared import for_each, refuses
from torch import nn

from laconic.comm.loopback import Loopback
from laconic.core.errors import AttachError, PeerError, StateError, WireError
from laconic.core.turn import Turn
from laconic.replicator.deployment import LaunchOptions, RankContext
from laconic.replicator.deployments.groups import place, serve_or_run
from laconic.replicator.servers.messages import Message, MessageKind, receive, send
from laconic.replicator.servers.optimizer_config import assign, to_config
from laconic.replicator.servers.parameter_shard import ParameterShard
from laconic.replicator.servers.server_client import ServerClient

SHAPES = ((20, 30), (20,), (40, 5))


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


def gradient(worker: int, step: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(100 * worker + step)
    return [torch.randn(shape, generator=rng) for shape in SHAPES]


def world(ranks: int, play, *, size: int = 1, servers: int = 1, staleness: int = 1000):
    """The results of the replicas in a world of threads."""

    def rank(comm: Loopback):
        return serve_or_run(comm, size, servers, staleness, play, LaunchOptions())

    return [each for results in Loopback.run(ranks, rank) for each in results]


@for_each("servers", [1, 2])
@for_each("compressor", ["dense()", "topk(density=0.05)", "qsgd(levels=127)"])
def test_all_gradients_arrive_or_wait_in_the_residual(compressor: str, servers: int) -> None:
    """By SGD of rate 1 from zero: parameters = -(sum of gradients - what is kept back); rounding to 1e-4."""

    done_together = threading.Barrier(2)

    def play(seat: RankContext):
        held = parameters()
        controller = ServerClient(seat, torch.optim.SGD(held, lr=1.0), compressor, "it", seed=0, number=0)
        for step in range(5):
            for each, grad in zip(held, gradient(seat.group, step), strict=True):
                each.grad = grad
            controller.step(lambda: pytest.fail("servers step, not workers"), None)
        done_together.wait(timeout=20)
        controller.finish()
        kept = {key: value for link in controller._links for key, value in residuals(link).items()}
        return controller, held, kept

    def residuals(link):
        empty = link.residual if link.keeps else torch.zeros_like(link.flat)
        return {
            entry.name: empty[entry.offset : entry.offset + entry.numel].view(entry.shape)
            for entry in link.layout
        }

    done = world(3 + servers - 1, play, servers=servers)
    assert [controller.stats().updates for controller, _, _ in done] == [10, 10]
    for i in range(len(SHAPES)):
        given = sum(gradient(worker, step)[i] for worker in range(2) for step in range(5))
        waiting = sum(kept[str(i)] for _, _, kept in done)
        tolerance = 1e-4 if "qsgd" not in compressor else 1.0  # unbiased: right on average only
        for _, held, _ in done:
            torch.testing.assert_close(held[i].detach(), waiting - given, rtol=0, atol=tolerance)
    if "topk" in compressor:
        assert all(kept["0"].abs().sum() > 0 for _, _, kept in done)


def test_a_workers_residuals_are_saved_restored_and_discarded() -> None:
    def play(seat: RankContext):
        held = parameters()
        client = ServerClient(
            seat, torch.optim.SGD(held, lr=1.0), "topk(density=0.05)", "it", seed=0, number=0
        )
        for each, grad in zip(held, gradient(seat.group, 0), strict=True):
            each.grad = grad
        client.step(lambda: pytest.fail("servers step, not workers"), None)
        state, before = client.state_dict(), [link.residual.clone() for link in client._links]
        client.discard()
        discarded = [bool(link.residual.any()) for link in client._links]
        client.load_state_dict(state)
        refuses(StateError, "rank", client.load_state_dict, state | {"rank": 7})
        refuses(StateError, "cannot gather their states", client.gathered, {})
        restored = all(map(torch.equal, [link.residual for link in client._links], before))
        client.finish()
        return client.steps, [bool(each.any()) for each in before], discarded, restored

    assert world(4, play, servers=2) == [(1, [True, True], [False, False], True)] * 2


def share(limit: int = 3, file: Path | None = None, every: int = 100, shapes=SHAPES) -> ParameterShard:
    named = {f"{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes)}
    config = to_config(torch.optim.SGD(named.values(), lr=1.0), {p: name for name, p in named.items()})
    config |= {"name": "it", "compressor": "dense()", "number": 0}
    config["tensors"] = [[name, list(each.shape)] for name, each in named.items()]
    return ParameterShard(
        config, torch.zeros(sum(each.numel() for each in named.values())), limit, file, every
    )


def test_staleness_counts_updates_since_the_pull() -> None:
    held = share(limit=2)
    groups = [{"lr": 0.5}]
    wire = held.wires.encode(torch.ones_like(held.flat), Turn(0))
    pulled, staleness = (0, 0, 1, 1, 0, 4), [0, 1, 1, 2, None, 0]
    assert [held.push(groups, version, wire, 0) for version in pulled] == staleness
    assert held.version == 5
    assert held.refused == 1
    assert dict(held.staleness) == {0: 2, 1: 2, 2: 1}
    torch.testing.assert_close(held.flat, torch.full_like(held.flat, -2.5))


def test_a_checkpoint_goes_on_and_another_models_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "it.pt"
    first = share(file=file, every=2)
    wire = first.wires.encode(torch.ones_like(first.flat), Turn(0))
    for version in range(3):
        first.push([{"momentum": 0.9}], version, wire, 0)
    assert torch.load(file, weights_only=True)["version"] == 2
    first.save()
    second = share(file=file, every=2)
    assert second.version == 3
    for each in (first, second):
        each.push([{"momentum": 0.9}], 3, wire, 0)
    assert torch.equal(first.flat, second.flat)  # momentum too
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    refuses(StateError, "has other tensors", share, file=file, shapes=((3, 3),))
    whole = file.read_bytes()
    torch.save(torch.load(file, weights_only=True) | {"class": "Adam"}, file)
    refuses(StateError, r"it\.pt is of Adam, but this optimiser is ", share, file=file)
    for damaged in (b"", b"garbage", whole[:-100]):
        file.write_bytes(damaged)
        refuses(StateError, r"it\.pt is damaged or no checkpoint: remove it", share, file=file)


def test_tensors_are_dealt_evenly_and_whole() -> None:
    sizes = [7, 100, 3, 90, 50, 1]
    homes = assign(sizes, servers=3)
    loads = [
        sum(size for size, home in zip(sizes, homes, strict=True) if home == server) for server in range(3)
    ]
    assert max(loads) == 100
    assert sum(loads) == sum(sizes)
    assert assign([5], servers=4) == [0]


def test_servers_take_no_device_from_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines of 4 ranks, the first 3 ranks servers: one replica on the first, four on the second."""
    found = []
    for rank in range(3, 8):
        monkeypatch.setenv("LOCAL_RANK", str(rank % 4))
        found.append(place(rank, servers=3))
    assert found == [0, 0, 1, 2, 3]


class Strange(torch.optim.SGD):
    """One whose arguments are not those of its groups."""

    def __init__(self, params, rate):
        super().__init__(params, lr=rate)


def pushing(seat: RankContext, optimizer: torch.optim.Optimizer, compressor: str = "dense()") -> ServerClient:
    return ServerClient(seat, optimizer, compressor, "it", seed=0, number=0)


def test_what_servers_cannot_do_is_refused() -> None:
    doubles, complexes = (nn.Parameter(torch.zeros(3, dtype=d)) for d in (torch.float64, torch.complex64))
    for optimizer, words in (
        (Strange(parameters(), 0.1), r"server 0 says: .*Strange cannot be built .*'rate'"),
        (torch.optim.SGD([doubles], lr=0.1), "but servers use float32"),
        (torch.optim.SGD([complexes], lr=0.1), "but servers use float32"),
    ):
        refuses(AttachError, words, world, 2, lambda seat, optimizer=optimizer: pushing(seat, optimizer))

    def play(seat: RankContext) -> str:
        (pair,) = seat.servers
        send(pair, 0, Message(MessageKind.PULL, 5))
        return str(receive(pair, 0).body)

    assert world(2, play) == ["no optimiser 5 was opened here"]


def test_what_is_no_call_is_refused() -> None:
    def play(comm: Loopback) -> Message | None:
        if comm.rank == 0:
            send(comm, 1, Message(MessageKind.PUSH, 2, 3, {"lr": [0.1]}, torch.arange(5, dtype=torch.uint8)))
            comm.exchange({1: torch.tensor([99, 8, 0, 0])}, {})
            return None
        call = receive(comm, 0)
        refuses(WireError, "must begin with", receive, comm, 0)
        return call

    call = Loopback.run(2, play)[1]
    assert call is not None and call.tensors is not None
    assert (call.kind, call.number, call.version, call.body) == (MessageKind.PUSH, 2, 3, {"lr": [0.1]})
    assert call.tensors.tolist() == [0, 1, 2, 3, 4]


def test_a_group_hears_why_its_first_replica_failed() -> None:
    def fail() -> None:
        raise WireError("codec is damaged")

    def play(seat: RankContext) -> None:
        error, words = WireError, "codec is damaged"
        if seat.comm.rank:
            error, words = PeerError, "replica 0 of this group says: codec is damaged"
        link = pushing(seat, torch.optim.SGD(parameters(), lr=1.0))
        refuses(error, words, link._on_leader, fail)

    world(3, play, size=2)
