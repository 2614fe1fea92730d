"""The example's app: as a Flower user writes it, and what two lines make of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import laconic
from tests.flower.flower_world import RUN, MemoryGrid

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
NODES = 4


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("digits_app")]:
        del sys.modules[name]


class Partitions(MemoryGrid):
    """Each node has examples of its own."""

    def _context(self, node: int) -> Context:
        return Context(RUN, node, {"partition-id": node}, RecordDict(), {"local-epochs": 2})


def trained(app: ClientApp, strategy: Any, rounds: int) -> tuple[float, MemoryGrid]:
    from digits_app.task import accuracy, net

    grid = Partitions(dict.fromkeys(range(NODES), app))
    result = strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=rounds)
    model = net()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    return accuracy(model), grid


def averaging() -> FedAvg:
    return FedAvg(min_train_nodes=NODES, min_available_nodes=NODES, fraction_evaluate=0.0)


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


def test_two_lines_make_it_fifty_times_cheaper(example: Any) -> None:
    from digits_app.client_app import app

    rounds = 60
    plain, grid = trained(plain_client(), averaging(), rounds)
    dense = carried(grid.sent) + carried(grid.came)
    stc = "stc(density=0.0025)"
    strategy = laconic.federated.compressed(averaging(), up=stc, down=stc)
    ours, _ = trained(app, strategy, rounds)
    sent = strategy.traffic.down_nbytes + strategy.traffic.up_nbytes
    assert dense / sent > 50
    assert ours > plain - 0.03
