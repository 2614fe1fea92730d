"""The server's cache: the shortest message of three, exact bit for bit."""

from __future__ import annotations

import torch

from laconic.federated.cache import Cache
from laconic.federated.client import Client
from laconic.federated.message import Kind
from laconic.federated.rounds import deliver
from laconic.federated.server import Server


def test_a_zero_that_changes_its_sign_travels() -> None:
    first = {"w": torch.zeros(1000)}
    server, client = Server(first), Client(first)
    server.receive("a", client.reply(deliver(server, client, "a")))
    changed = first["w"].clone()
    changed[3], changed[5] = -0.0, 1.0
    server.publish({"w": changed})
    held = deliver(server, client, "a")["w"]
    assert torch.equal(held.view(torch.int32), changed.view(torch.int32))


def test_entries_serve_where_only_the_last_answer_is_kept() -> None:
    n = 10_000
    cache, model = Cache(n, most_nbytes=100), torch.zeros(n)
    for version in range(2, 8):
        changed = torch.zeros(n, dtype=torch.bool)
        changed[version] = True
        cache.add(version, torch.zeros(90, dtype=torch.uint8), changed)
    kinds = [cache.since(base, 7, model)[0] for base in (0, 3, 6, 7)]
    assert kinds == [Kind.WHOLE, Kind.ENTRIES, Kind.UPDATES, Kind.UPDATES]
