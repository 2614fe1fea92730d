"""Untrusted client replies: Flower's strategies end the run at one inconsistent reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore import log

from laconic.federated.flower import agreement
from laconic.federated.flower.records import (
    STYPE,
    WIRE,
    is_packed,
    nbytes_of,
    only_arrays,
    record_of,
    unpacked,
)
from laconic.federated.message import Refused
from laconic.federated.server import Server

WITHOUT_MOD = f"""this client cannot read {STYPE!r}: put laconic.federated.mod() first in the mods of its
 ClientApp""".replace("\n", "")


@dataclass(frozen=True)
class Asked:
    """Message of the strategy, name of its arrays, and the encoded message."""

    plain: Message
    key: str
    coded: Message

    @property
    def node(self) -> int:
        return self.plain.metadata.dst_node_id

    @property
    def action(self) -> str:
        return self.plain.metadata.message_type.split(".")[0]


def checked(
    replies: Sequence[Message],
    asked: Mapping[int, Asked],
    server: Server,
    weighted_by: str | None,
    loss: str | None,
    others: bool,
) -> list[Message]:
    """Return the replies in a form safe for the strategy, in the order of node ids.

    `others`: whether plain messages were sent too, whose replies pass through.
    """
    result: list[Message] = []
    agreeing: list[tuple[Message, tuple[str, agreement.Signature]]] = []
    for reply in replies:
        node = reply.metadata.src_node_id
        if node not in asked:
            if others:
                result.append(reply)
            else:
                _count(server, reply, Refused("not asked", "this node was sent no message"))
                log(WARNING, "laconic refused a reply of node %s, which was sent no message", node)
        elif reply.has_error():
            result.append(_failed(reply, asked[node], server))
        else:
            try:
                of_training = asked[node].action == "train"
                found = agreement.metrics_of(reply.content, weighted_by, loss if of_training else None)
                agreeing.append((reply, agreement.signature(*found)))
            except Refused as error:
                _count(server, reply, error)
                result.append(_refusal(asked[node], error))
    expected = agreement.usual([signature for _, signature in agreeing])
    for reply, signature in agreeing:
        each = asked[reply.metadata.src_node_id]
        try:
            result.append(_decoded(reply, each, server, signature == expected))
        except Refused as error:
            result.append(_refusal(each, error))
    return sorted(result, key=lambda reply: reply.metadata.src_node_id)


def _decoded(reply: Message, asked: Asked, server: Server, agrees: bool) -> Message:
    node = str(asked.node)
    try:
        if not agrees:
            raise Refused(
                "other metrics", "its metrics have other names or lengths than those of most clients"
            )
        if asked.action == "train":
            wire = unpacked(only_arrays(reply.content)[1])
        elif WIRE in reply.content.array_records and is_packed(reply.content.array_records[WIRE]):
            wire = unpacked(reply.content.array_records[WIRE])
        else:
            raise Refused("not compressed", WITHOUT_MOD)
    except Refused as error:
        _count(server, reply, error)
        raise
    others = {
        name: value
        for name, value in reply.content.items()
        if name not in reply.content.array_records and name != asked.key
    }
    if asked.action == "train":
        content = RecordDict({asked.key: record_of(server.receive(node, wire)), **others})
    else:
        server.noted(node, wire)
        content = RecordDict(others)
    reply.content = content
    return reply


def _count(server: Server, reply: Message, error: Refused) -> None:
    node = str(reply.metadata.src_node_id)
    nbytes = 0
    if reply.has_content():
        nbytes = sum(map(nbytes_of, reply.content.array_records.values()))
    server.traffic.came_up(node, nbytes)
    server.traffic.refuse(node, error.reason, str(error))


def _failed(reply: Message, asked: Asked, server: Server) -> Message:
    if STYPE not in (reply.error.reason or ""):
        return reply
    error = Refused("not compressed", WITHOUT_MOD)
    _count(server, reply, error)
    return _refusal(asked, error)


def _refusal(asked: Asked, error: Refused) -> Message:
    reason = f"laconic refused the reply of node {asked.node}: {error}"
    log(WARNING, "%s", reason)
    return Message(Error(ErrorCode.UNKNOWN, reason), reply_to=asked.coded)
