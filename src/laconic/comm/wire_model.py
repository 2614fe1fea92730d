"""Bytes that messages and collectives put on a TCP/IP link, as the interface counts them.

The model is fitted to gloo on Ethernet; `python -m benchmarks.wire` compares it with the counters:

- Every packet has 66 bytes of headers: Ethernet 14, IPv4 20, TCP 20, TCP time stamps 12. Data travel in
  segments of `mtu` - 52 bytes (1448 of 1500).
- A message has a preamble of 48 bytes. Before it, sender and receiver each send a packet of 48 bytes.
- The receiver acknowledges every second packet with an empty one (RFC 5681); a slow one less often, where the
  model counts too much.

It ignores other traffic (creating groups, the store, ARP) and retransmissions. Segmentation by the network
card (TSO) hides up to 44 of 45 headers from the host's counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

HEADERS = 66
PREAMBLE = 48
SEGMENT = 1 << 20  # bytes; gloo's largest message in its ring
SHORT = 1 << 18  # bytes; up to here a sum is two rounds of direct messages


@dataclass(frozen=True)
class Messages:
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


@dataclass(frozen=True)
class PacketModel:
    """Link whose packets carry at most `mtu` bytes above the Ethernet header.

    >>> PacketModel().forth(1_000_000), PacketModel().back(1_000_000)
    (1045768, 22950)
    """

    mtu: int = 1500

    def forth(self, nbytes: int) -> int:
        """Return the bytes in the direction of a message, with headers and announcement."""
        return (self.packets(nbytes) + 1) * HEADERS + 2 * PREAMBLE + nbytes

    def back(self, nbytes: int) -> int:
        """Return the bytes in the other direction."""
        return HEADERS + PREAMBLE + (self.packets(nbytes) + 1) // 2 * HEADERS

    def packets(self, nbytes: int) -> int:
        return -(-(PREAMBLE + nbytes) // (self.mtu - 52))

    def sent(self, messages: Messages) -> int:
        return _one_way(self, messages.sent, messages.received)

    def received(self, messages: Messages) -> int:
        return _one_way(self, messages.received, messages.sent)


@lru_cache(maxsize=4096)
def _one_way(link: PacketModel, forth: tuple[int, ...], back: tuple[int, ...]) -> int:
    return sum(map(link.forth, forth)) + sum(map(link.back, back))


def is_direct(nbytes: int, size: int) -> bool:
    """Return whether `TorchComm` sums this many bytes in two rounds, not by gloo's ring."""
    return size > 2 and nbytes <= SHORT


def rounds(nbytes: float, size: int) -> int:
    return 2 if is_direct(int(nbytes), size) else 2 * (size - 1)


@lru_cache(maxsize=4096)
def all_reduce(nbytes: int, size: int) -> Messages:
    """Return the messages of a sum: 2(N-1)/N of the bytes each way.

    Short sums: one piece to each other rank, and its sum back. gloo's ring: at least two pieces per rank;
    each rank passes on all other pieces, twice.

    >>> sum(all_reduce(4_000_000, size=4).sent), len(all_reduce(4_000, size=4).sent)
    (6000000, 6)
    """
    if size == 1 or nbytes == 0:
        return Messages()
    if is_direct(nbytes, size):
        passed = (-(-nbytes // size),) * (2 * (size - 1))
        return Messages(passed, passed)
    pieces = max(-(-nbytes // SEGMENT), 2 * size)
    a_rank = -(-pieces // size)
    passed = (-(-nbytes // (a_rank * size)),) * (2 * a_rank * (size - 1))
    return Messages(passed, passed)


def all_reduce_bytes(nbytes: float, size: int) -> float:
    """Return the bytes sent to all-reduce `nbytes`, without headers.

    >>> all_reduce_bytes(4_000_000, size=4)
    6000000.0
    """
    return 2 * (size - 1) / size * nbytes


def all_gather_bytes(nbytes: float, size: int) -> float:
    """Return the bytes sent to all-gather `nbytes`, without headers.

    >>> all_gather_bytes(500_000, size=4)
    1500000
    """
    return (size - 1) * nbytes


def direct(sent: Sequence[int], received: Sequence[int], lengths: int = 0) -> Messages:
    """Return these messages without empty ones, after `lengths` messages of 8 bytes."""
    return _direct(tuple(sent), tuple(received), lengths)


@lru_cache(maxsize=4096)
def _direct(sent: tuple[int, ...], received: tuple[int, ...], lengths: int) -> Messages:
    head = (8,) * lengths
    return Messages(head + tuple(n for n in sent if n), head + tuple(n for n in received if n))


@lru_cache(maxsize=4096)
def broadcast(nbytes: int, size: int, place: int) -> Messages:
    """Return the messages of gloo's broadcast tree: in round i place p < 2^i sends to p + 2^i; root is 0.

    >>> [len(broadcast(1, size=6, place=place).sent) for place in range(6)]
    [3, 2, 0, 0, 0, 0]
    """
    if nbytes == 0:
        return Messages()
    rounds = (1 << i for i in range(size.bit_length()))
    children = [place + step for step in rounds if step > place and place + step < size]
    return Messages((nbytes,) * len(children), (nbytes,) * (place > 0))
