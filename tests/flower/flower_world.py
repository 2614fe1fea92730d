"""Flower without its network: a grid in memory, whose nodes are a real ClientApp each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

import laconic
from tests.unit.federated_world import train as trained_by

RUN = 7
Spoil = Callable[[int, Message, Message], Message]  # node, what it got, what it answers -> what arrives
Nodes = dict[int, ClientApp]


def app(node: int, mods: list[Any], seen: list[Any] | None = None) -> ClientApp:
    """A client app as a user writes it: it knows nothing of compression."""
    made = ClientApp(mods=mods)

    @made.train()
    def train(message: Message, context: Context) -> Message:
        tensors = message.content["arrays"].to_torch_state_dict()
        number = int(message.content["config"]["server-round"])
        if seen is not None:
            seen.append((node, number, dict(message.content["config"]), tensors))
        result, examples = trained_by(node, tensors, number)
        metrics = MetricRecord({"num-examples": examples, "loss": 1.0 / number})
        return Message(RecordDict({"arrays": ArrayRecord(result), "metrics": metrics}), reply_to=message)

    @made.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        tensors = message.content["arrays"].to_torch_state_dict()
        size = float(sum(value.double().abs().sum() for value in tensors.values() if value.dim()))
        metrics = MetricRecord({"num-examples": 1 + node, "size": size})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return made


class MemoryGrid(Grid):
    """Carries messages to apps in this process, as bytes of Flower's own format would."""

    def __init__(self, nodes: Nodes, spoil: Spoil = lambda node, message, reply: reply) -> None:
        self.nodes, self.spoil = nodes, spoil
        self.sent: list[Message] = []
        self.came: list[Message] = []

    def _context(self, node: int) -> Context:
        return Context(RUN, node, {}, RecordDict(), {})

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return Message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = f"message {len(self.sent)}"
            self.sent.append(message)
            there = Message(RecordDict(dict(message.content)), metadata=message.metadata)
            context = self._context(node)
            try:
                reply = self.nodes[node](there, context)
            except Exception as error:  # as the process of a ClientApp does
                raised = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>")
                reply = Message(raised, reply_to=message)
            self.came.append(reply)
            replies.append(self.spoil(node, message, reply))
        return replies


def nodes(folder: Path, count: int = 4, seen: list[Any] | None = None) -> Nodes:
    """Apps with our mod, all in one folder."""
    return {node: app(node, [laconic.federated.mod(folder)], seen) for node in range(count)}


def tensors_of(record: ArrayRecord) -> dict[str, torch.Tensor]:
    return record.to_torch_state_dict()
