"""The example's app over a grid in memory, as a Flower user writes it and with the two lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import laconic
from tests.flower.flower_world import RUN, MemoryGrid

NODES, ROUNDS, STC = 4, 60, "stc(density=0.0025)"


@dataclass(frozen=True)
class Compared:
    """Bytes of all messages, up and down, and accuracy in the end: plain, and with the two lines."""

    plain_nbytes: int
    plain_accuracy: float
    nbytes: int
    accuracy: float


class Partitions(MemoryGrid):
    """Each node has examples of its own."""

    def _context(self, node: int) -> Context:
        return Context(RUN, node, {"partition-id": node}, RecordDict(), {"local-epochs": 2})


def compared(nodes: int = NODES) -> Compared:
    """Train the app both ways on so many nodes. `digits_app` must be importable."""
    from digits_app.client_app import app

    plain, grid = trained(plain_client(), averaging(nodes), nodes)
    strategy = laconic.federated.compressed(averaging(nodes), up=STC, down=STC)
    ours, _ = trained(app, strategy, nodes)
    return Compared(
        plain_nbytes=carried(grid.sent) + carried(grid.came),
        plain_accuracy=plain,
        nbytes=strategy.traffic.down_nbytes + strategy.traffic.up_nbytes,
        accuracy=ours,
    )


def trained(app: ClientApp, strategy: Any, nodes: int) -> tuple[float, MemoryGrid]:
    from digits_app.task import accuracy, net

    grid = Partitions(dict.fromkeys(range(nodes), app))
    result = strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=ROUNDS)
    model = net()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    return accuracy(model), grid


def averaging(nodes: int) -> FedAvg:
    return FedAvg(min_train_nodes=nodes, min_available_nodes=nodes, fraction_evaluate=0.0)


def plain_client() -> ClientApp:
    from digits_app import client_app

    plain = ClientApp()

    @plain.train()
    def train(message: Message, context: Context) -> Message:
        return client_app.train(message, context)

    return plain


def carried(messages: Any) -> int:
    """Bytes of all arrays of messages."""
    return sum(
        len(array.data)
        for message in messages
        for record in message.content.array_records.values()
        for array in record.values()
    )
