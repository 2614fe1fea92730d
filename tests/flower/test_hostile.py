"""A client that answers what it should not: refused with id and reason, counted; the round goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, QFedAvg

import laconic
from laconic.core.framing import as_bytes, counts_bytes
from laconic.federated import message as wires
from laconic.federated.flower.records import packed
from tests.flower.flower_world import MemoryGrid, app, nodes, tensors_of
from tests.unit.federated_world import equal, model

HOSTILE = 3
BIG = 1 << 20
FLOATS = sum(value.numel() for name, value in model().items() if value.dim() == 2 or "bias" in name)


def wire_of(reply: Message) -> torch.Tensor:
    return torch.frombuffer(bytearray(reply.content["arrays"]["laconic"].data), dtype=torch.uint8)


def with_wire(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Message], None]:
    def spoil(reply: Message) -> None:
        reply.content["arrays"] = packed(change(wire_of(reply)))

    return spoil


def rewritten(**fields: Any) -> Callable[[Message], None]:
    """A message that is well formed, with its checksum, and says something else."""
    return with_wire(lambda wire: replace(wires.Message.unpack(wire, BIG), **fields).pack())


def values(number: float) -> Callable[[Message], None]:
    """Every value of the update is this one."""

    def change(wire: torch.Tensor) -> torch.Tensor:
        found = wires.Message.unpack(wire, BIG)
        carried = found.body.numel() - 4 - 4 * FLOATS
        update = as_bytes(torch.full((FLOATS,), number))
        head = counts_bytes(torch.tensor([update.numel()]))
        return replace(found, body=torch.cat([found.body[:carried], head, update])).pack()

    return with_wire(change)


def metrics(**given: Any) -> Callable[[Message], None]:
    def spoil(reply: Message) -> None:
        reply.content["metrics"] = MetricRecord(given)

    return spoil


def arrays(record: ArrayRecord) -> Callable[[Message], None]:
    def spoil(reply: Message) -> None:
        reply.content["arrays"] = record

    return spoil


def without_metrics(reply: Message) -> None:
    del reply.content["metrics"]


def twice(reply: Message) -> None:
    reply.content["more"] = reply.content["arrays"]


def beside(reply: Message) -> None:
    reply.content["arrays"]["more"] = Array(np.zeros(3))


def claims(shape: tuple[int, ...], dtype: str = "uint8") -> Callable[[Message], None]:
    def spoil(reply: Message) -> None:
        data = reply.content["arrays"]["laconic"].data
        reply.content["arrays"] = ArrayRecord({"laconic": Array(dtype, shape, "laconic.v1", data)})

    return spoil


SHAPE = {name: torch.zeros(2, 2) for name in model()}
ATTACKS: dict[str, tuple[Callable[[Message], None], str]] = {
    "noise": (with_wire(lambda wire: torch.randint(0, 256, (wire.numel(),), dtype=torch.uint8)), "malformed"),
    "empty": (with_wire(lambda wire: wire[:0]), "truncated"),
    "truncated": (with_wire(lambda wire: wire[:-7]), "truncated"),
    "one bit": (with_wire(lambda wire: wire ^ (torch.arange(wire.numel()) == 90)), "malformed"),
    "oversized": (with_wire(lambda wire: torch.cat([wire, wire.new_zeros(BIG)])), "oversized"),
    "wrong round": (rewritten(base=99, version=99), "wrong round"),
    "another's": (rewritten(token=4711), "wrong round"),
    "other model": (rewritten(fingerprint=b"deadbeef"), "other model"),
    "other spec": (rewritten(up="topk(density=1)"), "other spec"),
    "a server's": (rewritten(kind=wires.Kind.WHOLE), "malformed"),
    "other length": (rewritten(body=torch.zeros(77, dtype=torch.uint8)), "malformed"),
    "nan": (values(float("nan")), "malformed"),
    "inf": (values(float("inf")), "malformed"),
    "huge": (values(1e30), "too large"),
    "no metrics": (without_metrics, "malformed"),
    "other metrics": (metrics(**{"num-examples": 3, "accuracy": 1.0}), "other metrics"),
    "list": (metrics(**{"num-examples": 3, "loss": [1.0, 2.0]}), "other metrics"),
    "no weight": (metrics(loss=1.0), "malformed"),
    "weights": (metrics(**{"num-examples": [1, 2], "loss": 1.0}), "malformed"),
    "negative weight": (metrics(**{"num-examples": -10, "loss": 1.0}), "malformed"),
    "nan weight": (metrics(**{"num-examples": float("nan"), "loss": 1.0}), "not finite"),
    "huge weight": (metrics(**{"num-examples": 1.7e308, "loss": 1.0}), "too large"),
    "more than all data": (metrics(**{"num-examples": 2**53 + 1, "loss": 1.0}), "too large"),
    "nan loss": (metrics(**{"num-examples": 3, "loss": float("nan")}), "not finite"),
    "two records": (twice, "malformed"),
    "an array more": (beside, "malformed"),
    "claims a shape": (claims((BIG, BIG)), "malformed"),
    "claims a dtype": (claims((5,), "float64"), "malformed"),
    "plain arrays": (arrays(ArrayRecord(model())), "not compressed"),
    "wrong shapes": (arrays(ArrayRecord(SHAPE)), "not compressed"),
    "unknown stype": (arrays(ArrayRecord({"w": Array("x", (3,), "pickle", b"x")})), "not compressed"),
    "no arrays": (arrays(ArrayRecord()), "not compressed"),
}


def strategy(up: str = "dense()", count: int = 4, **more: Any) -> Any:
    inner = FedAvg(min_train_nodes=count, min_available_nodes=count, **more)
    return laconic.federated.compressed(inner, up=up, down="stc(density=0.05)")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The model after three rounds without the hostile client."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
    grid = MemoryGrid(nodes(tmp_path_factory.mktemp("undisturbed"), 3))
    return tensors_of(strategy(count=3).start(grid, ArrayRecord(model()), num_rounds=3).arrays)


def test_hostile_replies_change_nothing(
    tmp_path: Path,
    undisturbed: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each attack comes from a node of its own, beside the three honest ones."""
    attacks = dict(enumerate(ATTACKS.values(), HOSTILE))

    def arrives(node: int, message: Message, reply: Message) -> Message:
        if node in attacks and message.metadata.message_type == "train":
            attacks[node][0](reply)
        return reply

    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    count = HOSTILE + len(attacks)
    grid, compressed = MemoryGrid(nodes(tmp_path, count), arrives), strategy(count=count)
    with caplog.at_level(logging.WARNING):
        result = compressed.start(grid, ArrayRecord(model()), num_rounds=3)
    names = dict(zip(map(str, attacks), ATTACKS, strict=True))
    refusals = {(names[node], reason): n for (node, reason), n in compressed.traffic.refusals.items()}
    assert refusals == {(name, reason): 3 for name, (_, reason) in ATTACKS.items()}
    assert equal(tensors_of(result.arrays), undisturbed)
    for node, (_, reason) in attacks.items():
        words = f"laconic refused the reply of node {node}: {reason}"
        assert caplog.text.count(words) == 3, names[str(node)]
    assert set(result.train_metrics_clientapp) == {1, 2, 3}


def test_two_huge_weights_are_no_infinity(tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    """1.7e308 + 1.7e308 is Inf: every client's share of the mean was then 0 or NaN."""

    def arrives(node: int, message: Message, reply: Message) -> Message:
        if node >= HOSTILE and message.metadata.message_type == "train":
            reply.content["metrics"]["num-examples"] = 1.7e308
        return reply

    compressed = strategy(count=5)
    grid = MemoryGrid(nodes(tmp_path, 5), arrives)
    result = compressed.start(grid, ArrayRecord(model()), num_rounds=3)
    assert equal(tensors_of(result.arrays), undisturbed)
    assert compressed.traffic.refusals == {("3", "too large"): 3, ("4", "too large"): 3}


@pytest.mark.parametrize(("loss", "reason"), [(-1.0, "malformed"), (1e300, "too large")])
def test_q_fedavg_takes_no_power_of_such_a_loss(loss: float, reason: str, tmp_path: Path) -> None:
    """(-1) ** 0.1 is NaN, and so was every parameter of the next model."""

    def arrives(node: int, message: Message, reply: Message) -> Message:
        if node == HOSTILE and message.metadata.message_type == "train":
            reply.content["metrics"]["loss"] = loss
        return reply

    inner = QFedAvg(client_learning_rate=0.1, train_loss_key="loss", min_train_nodes=4, min_available_nodes=4)
    compressed = laconic.federated.compressed(inner, up="dense()")
    floating = {name: value for name, value in model().items() if value.is_floating_point()}
    result = compressed.start(MemoryGrid(nodes(tmp_path), arrives), ArrayRecord(floating), num_rounds=2)
    assert all(bool(value.isfinite().all()) for value in tensors_of(result.arrays).values())
    assert compressed.traffic.refusals == {("3", reason): 2}


def test_a_replayed_reply_is_refused(tmp_path: Path) -> None:
    kept: list[bytes] = []

    def arrives(node: int, message: Message, reply: Message) -> Message:
        if node == HOSTILE and message.metadata.message_type == "train":
            kept.append(reply.content["arrays"]["laconic"].data)
            reply.content["arrays"] = packed(torch.frombuffer(bytearray(kept[0]), dtype=torch.uint8))
        return reply

    compressed = strategy(fraction_evaluate=0.0)
    compressed.start(MemoryGrid(nodes(tmp_path), arrives), ArrayRecord(model()), num_rounds=4)
    assert compressed.traffic.refusals == {("3", "replayed"): 3}


def test_a_hostile_note_does_not_make_the_server_forget(tmp_path: Path) -> None:
    """What an evaluation says that one holds is checked as what a training says that one has learned."""

    def arrives(node: int, message: Message, reply: Message) -> Message:
        if node == HOSTILE and message.metadata.message_type == "evaluate":
            reply.content["laconic"] = packed(torch.zeros(90, dtype=torch.uint8))
        return reply

    compressed = strategy()
    result = compressed.start(MemoryGrid(nodes(tmp_path), arrives), ArrayRecord(model()), num_rounds=3)
    assert compressed.traffic.refusals == {("3", "malformed"): 3}
    assert set(result.evaluate_metrics_clientapp) == {1, 2, 3}


@pytest.mark.parametrize("mods", [[], ["LocalDpMod"]], ids=["no mod", "not the first"])
def test_a_client_without_the_mod_is_refused_in_plain_words(mods: list[str], tmp_path: Path) -> None:
    from flwr.clientapp.mod import LocalDpMod

    late = [LocalDpMod(1.0, 0.1, 1.0, 0.1), laconic.federated.mod(tmp_path)] if mods else []
    world = {**nodes(tmp_path), HOSTILE: app(HOSTILE, late)}
    compressed = strategy(fraction_evaluate=0.0)
    result = compressed.start(MemoryGrid(world), ArrayRecord(model()), num_rounds=2)
    assert compressed.traffic.refusals == {("3", "not compressed"): 2}
    details = compressed.traffic.rounds[0].refused[0][2]
    assert "put laconic.federated.mod() first in the mods of its ClientApp" in details
    assert set(result.train_metrics_clientapp) == {1, 2}


def test_a_round_of_hostile_clients_alone_leaves_the_model(tmp_path: Path) -> None:
    def arrives(node: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and len(compressed.server.traffic.rounds) == 1:
            without_metrics(reply)
        return reply

    compressed = strategy(fraction_evaluate=0.0)
    with_nothing = compressed.start(MemoryGrid(nodes(tmp_path), arrives), ArrayRecord(model()), num_rounds=3)
    assert not with_nothing.train_metrics_clientapp
    assert equal(compressed.server.public, model())


def test_who_was_not_asked_is_not_heard(tmp_path: Path) -> None:
    world = nodes(tmp_path)

    def arrives(node: int, message: Message, reply: Message) -> Message:
        if node == HOSTILE:
            reply.metadata.__dict__["_src_node_id"] = 99
        return reply

    compressed = strategy(fraction_evaluate=0.0)
    compressed.start(MemoryGrid(world, arrives), ArrayRecord(model()), num_rounds=1)
    assert compressed.traffic.refusals == {("99", "not asked"): 1}


def test_long_updates_are_clipped(tmp_path: Path) -> None:
    inner = FedAvg(min_train_nodes=4, min_available_nodes=4, fraction_evaluate=0.0)
    compressed = laconic.federated.compressed(inner, up="dense()", max_norm=0.5)
    result = compressed.start(MemoryGrid(nodes(tmp_path)), ArrayRecord(model()), num_rounds=1)
    form = compressed.server.form
    moved = (form.flat(tensors_of(result.arrays)) - form.flat(model())).norm()
    assert float(moved) <= 0.5 + 1e-5


def test_secure_aggregation_is_refused_with_its_reason(tmp_path: Path) -> None:
    client = nodes(tmp_path)[0]
    content = RecordDict({"secaggplus_configs": ConfigRecord({"stage": "setup"})})
    from flwr.app import Context

    reply = client(Message(content, 0, "train"), Context(7, 0, {}, RecordDict(), {}))
    assert "use laconic.federated.mod() or secaggplus_mod, not both" in reply.error.reason
