"""Numbers and bytes of messages between two ranks, without a collective."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.comm.wire_model import PacketModel

LINK = PacketModel()


@dataclass(frozen=True)
class MessageCounts:
    """Messages of one kind. `dense_bytes`: bytes of the sent ones as float32."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    dense_bytes: int = 0

    def plus(self, sent: int = 0, received: int = 0, dense: int = 0) -> MessageCounts:
        return MessageCounts(
            self.sent + (sent > 0),
            self.sent_bytes + sent,
            self.received + (received > 0),
            self.received_bytes + received,
            self.dense_bytes + dense,
        )

    def minus(self, before: MessageCounts) -> MessageCounts:
        pairs = zip(vars(self).values(), vars(before).values(), strict=True)
        return MessageCounts(*(now - then for now, then in pairs))

    @property
    def network_sent(self) -> int:
        return _one_way(self.sent, self.sent_bytes, self.received, self.received_bytes)

    @property
    def network_received(self) -> int:
        return _one_way(self.received, self.received_bytes, self.sent, self.sent_bytes)

    @property
    def network_dense(self) -> int:
        return _one_way(self.sent, self.dense_bytes, self.received, self.received_bytes)


NONE = MessageCounts()


def _one_way(sent: int, sent_bytes: int, received: int, received_bytes: int) -> int:
    """Return the bytes in the direction of the sent messages, as if all had equal sizes."""
    forth = sent * LINK.forth(-(-sent_bytes // max(sent, 1)))
    return forth + received * LINK.back(-(-received_bytes // max(received, 1)))
