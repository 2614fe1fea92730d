"""Server side: a grid that encodes messages and decodes replies, or replaces bad ones by error replies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from logging import INFO

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore import log
from flwr.supercore.run import Run

from laconic.core.errors import SpecError
from laconic.federated.flower.records import (
    FORM,
    NEEDS_WHOLE,
    form_record,
    only_arrays,
    packed,
    rounded,
    tensors_of,
)
from laconic.federated.flower.replies import Asked, checked
from laconic.federated.form import Tensors
from laconic.federated.message import Refused
from laconic.federated.server import Server

POLL_S = 1.0
ACTIONS = ("train", "evaluate")


class CompressingGrid(Grid):
    """Grid that exchanges compressed messages.

    Args:
        serve: Creates the server from the first model.
        weighted_by: Metric that must be above 0; None: no check.
        loss: Metric that must be at least 0; None: no check.
        least_nodes: Nodes to wait for.
        trained: Called after each round of training.
    """

    def __init__(
        self,
        grid: Grid,
        serve: Callable[[Tensors], Server],
        *,
        weighted_by: str | None = None,
        loss: str | None = None,
        least_nodes: int = 0,
        trained: Callable[[], None] = lambda: None,
    ) -> None:
        self._grid, self._serve, self._trained = grid, serve, trained
        self._weighted_by, self._loss, self._least_nodes = weighted_by, loss, least_nodes
        self._last: dict[str, bytes] = {}
        self.server: Server | None = None

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes' ids, once there are enough.

        FedAvg samples from them before it waits for `min_available_nodes`, so it would miss late nodes.
        """
        while len(ids := list(self._grid.get_node_ids())) < self._least_nodes:
            log(INFO, "laconic: waiting for nodes: %d connected, %d needed", len(ids), self._least_nodes)
            time.sleep(POLL_S)
        return ids

    def get_nodes(self) -> Iterable[NodeInfo]:
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages, and return the decoded replies in the order of node ids.

        Raises `SpecError` if nodes get different models, a message has several ArrayRecords, or the form
        changes; `WireError` for NaN or Inf.
        """
        until = None if timeout is None else time.monotonic() + timeout
        asked: dict[int, Asked] = {}
        others = []
        for message in messages:
            coded = self._encoded(message, first=not asked)
            if coded is None:
                others.append(message)
            elif coded.node in asked:
                raise SpecError(f"the strategy has two messages for node {coded.node} in one round")
            else:
                asked[coded.node] = coded
        sent = [*others, *(each.coded for each in asked.values())]
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        if not asked:
            return replies
        if not others:
            replies = self._again(replies, asked, until)
        result = checked(replies, asked, self._made(), self._weighted_by, self._loss, bool(others))
        if any(each.action == "train" for each in asked.values()):
            self._trained()
        return result

    def _encoded(self, message: Message, first: bool) -> Asked | None:
        action = message.metadata.message_type.split(".")[0]
        if action not in ACTIONS or not message.content.array_records:
            return None
        try:
            key, record = only_arrays(message.content)
        except Refused as error:
            raise SpecError(f"compressed() supports strategies that send one model: {error}") from error
        self._publish(record, first)
        return self._coded(message, key)

    def _publish(self, record: ArrayRecord, first: bool) -> None:
        arrays = {name: array.data for name, array in record.items()}
        if arrays == self._last:
            return
        if not first:
            raise SpecError("compressed() supports strategies that send all nodes of a round the same model")
        tensors = tensors_of(record)
        if self.server is None:
            self.server = self._serve(tensors)
        else:
            self.server.publish(rounded(tensors, self.server.form))
        self._last = arrays

    def _coded(self, message: Message, key: str) -> Asked:
        server, node = self._made(), message.metadata.dst_node_id
        form = server.form if server.holds(str(node)) == 0 else None
        records = {key: packed(server.message_for(str(node)))}
        if form is not None:
            records[FORM] = form_record(form)
            server.traffic.sent_down(str(node), len(form.text.encode()), "form")
        others = {name: value for name, value in message.content.items() if name != key}
        coded = Message(
            RecordDict({**records, **others}),
            dst_node_id=node,
            message_type=message.metadata.message_type,
            ttl=message.metadata.ttl,
            group_id=message.metadata.group_id,
            dst_task_id=message.metadata.dst_task_id,
        )
        return Asked(message, key, coded)

    def _again(self, replies: list[Message], asked: dict[int, Asked], until: float | None) -> list[Message]:
        kept, lost = [], []
        for reply in replies:
            node = reply.metadata.src_node_id
            if node in asked and reply.has_error() and (reply.error.reason or "").startswith(NEEDS_WHOLE):
                lost.append(node)
            else:
                kept.append(reply)
        left = None if until is None else until - time.monotonic()
        if not lost or (left is not None and left <= 0):
            return replies
        for node in lost:
            log(INFO, "laconic: node %s lost its model: the whole model is sent", node)
            self._made().forget(str(node))
            asked[node] = self._coded(asked[node].plain, asked[node].key)
        return kept + list(self._grid.send_and_receive([asked[node].coded for node in lost], timeout=left))

    def _made(self) -> Server:
        assert self.server is not None, "a message was encoded"
        return self.server
