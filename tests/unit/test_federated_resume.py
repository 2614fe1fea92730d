"""A server that goes on from an older state: what happened since then is lost, and nobody is led astray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.unit.shared import for_each, refuses

from laconic.core.errors import StateError
from laconic.federated.client import Client
from laconic.federated.message import Kind, Message, NeedsWhole, Refused
from laconic.federated.rounds import deliver
from laconic.federated.server import Server
from laconic.federated.traffic import Traffic

from .federated_world import equal, model, train

WAYS = ("stc(density=0.05)", "stc(density=0.05)")


@for_each("known", [True, False])
@for_each("rounds", [1, 3])
def test_a_client_of_lost_rounds_gets_the_model_whole(known: bool, rounds: int) -> None:
    """Its version counts rounds that the server did otherwise the second time."""
    first = model()
    server, client = Server(first, *WAYS, shared_start=True), Client(first, shared_start=True)

    def do(number: int, server: Server) -> None:
        wire = client.reply(train(0, deliver(server, client, "a"), number)[0])
        server.publish(server.receive("a", wire))

    if known:
        do(1, server)
    saved = server.state_dict()
    for number in range(rounds):
        do(10 + number, server)
    deliver(server, client, "a")
    client.acknowledge()
    again = Server(first, *WAYS, shared_start=True)
    again.load_state_dict(saved)
    for number in range(rounds + 1):
        again.publish(train(1, again.public, 20 + number)[0])
    refuses(NeedsWhole, "has other values than the server's", lambda: client.receive(again.message_for("a")))
    assert equal(deliver(again, client, "a"), again.public)


def test_who_lost_a_reply_is_not_sent_the_model_whole() -> None:
    first = model()
    server, client = Server(first, *WAYS), Client(first)
    server.receive("a", client.reply(train(0, deliver(server, client, "a"), 1)[0]))
    for number in (2, 3):
        server.publish(train(1, server.public, number)[0])
        client.reply(train(0, deliver(server, client, "a"), number)[0])  # it never arrives
    server.publish(train(1, server.public, 4)[0])
    wire = server.message_for("a")
    assert Message.unpack(wire, 1 << 24).kind is not Kind.WHOLE
    assert equal(client.receive(wire), server.public)


def test_a_model_that_has_drifted_is_noticed() -> None:
    first = model()
    server, client = Server(first, *WAYS), Client(first)
    server.receive("a", client.reply(train(0, deliver(server, client, "a"), 1)[0]))
    server.publish(train(1, server.public, 2)[0])
    client._state["public"] = torch.nextafter(client._state["public"], torch.tensor(torch.inf))
    with pytest.raises(NeedsWhole):
        client.receive(server.message_for("a"))
    assert equal(deliver(server, client, "a"), server.public)


def test_bytes_and_refusals_are_counted_on(tmp_path: Path) -> None:
    first = model()
    one, client = Server(first, *WAYS), Client(first)
    for number in range(3):
        one.publish(one.receive("a", client.reply(train(0, deliver(one, client, "a"), number)[0])))
    with pytest.raises(Refused):
        one.receive("b", torch.zeros(9, dtype=torch.uint8))
    torch.save(one.state_dict(), tmp_path / "server.pt")
    other = Server(first, *WAYS)
    other.load_state_dict(torch.load(tmp_path / "server.pt", weights_only=True))
    for server in (one, other):
        server.message_for("a")
    assert other.traffic == one.traffic and other.traffic.refusals == {("b", "truncated"): 1}
    assert json.loads(json.dumps(other.traffic.as_dict()))["down_nbytes"] == one.traffic.down_nbytes


def test_counts_of_a_long_run_have_a_bound() -> None:
    """A server that serves for years keeps the last rounds one by one, and the sums of all."""
    traffic = Traffic()
    for number in range(1, 5001):
        traffic.begin(number)
        traffic.sent_down("a", 3, "whole")
        traffic.came_up("b", 2)
        traffic.refuse("b", "truncated", "of 3 bytes")
    for _ in range(5000):
        traffic.refuse("c", "replayed", "again")
    assert (traffic.down_nbytes, traffic.up_nbytes) == (15_000, 10_000)
    assert traffic.refusals == {("b", "truncated"): 5000, ("c", "replayed"): 5000}
    assert [each.number for each in traffic.rounds] == list(range(4001, 5001))
    assert sum(len(each.refused) for each in traffic.rounds) == 999 + 100
    assert Traffic.read(json.loads(json.dumps(traffic.as_dict()))) == traffic


def test_a_saved_state_of_another_server_is_refused() -> None:
    """With other specs its clients could not read the answers that it has kept."""
    first = model()
    state = Server(first, *WAYS).state_dict()
    for other in (Server(first, WAYS[0]), Server(first, "topk(density=0.05)", WAYS[1])):
        with pytest.raises(StateError, match=r"with up='stc\(density=0.05\)'.*use the same specs"):
            other.load_state_dict(state)
    with pytest.raises(StateError, match="another model"):
        Server({"w": torch.ones(3, 3)}, *WAYS).load_state_dict(state)
    refuses(StateError, "not a server's", lambda: Server(first).load_state_dict({"version": 1}))
