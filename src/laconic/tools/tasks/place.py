"""Where a worker of this machine runs: on the loopback interface with all others, or on a host of a lab.

`laconic lab -- laconic train ...` sets LACONIC_LAB to the network namespaces that stand for hosts. Workers
are spread over them in blocks, as torchrun spreads ranks over machines.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass

from laconic.tools.lab import linux

LAB = "LACONIC_LAB"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Hosts:
    """The hosts that workers are spread over. `namespaces`: their files; empty outside of a lab."""

    addresses: tuple[str, ...] = ("127.0.0.1",)
    interface: str = LOOPBACK
    namespaces: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> Hosts:
        """The hosts that LACONIC_LAB names, or this machine alone."""
        if LAB not in os.environ:
            return cls()
        lab = json.loads(os.environ[LAB])
        return cls(tuple(lab["addresses"]), lab["interface"], tuple(lab["namespaces"]))

    def of(self, rank: int, size: int) -> int:
        """The host of a rank.

        >>> [Hosts(("a", "b")).of(rank, 5) for rank in range(5)]
        [0, 0, 0, 1, 1]
        """
        return rank * len(self.addresses) // size

    def enter(self, rank: int, size: int) -> None:
        """Enter the network namespace of the rank's host: sockets opened later belong to it."""
        if self.namespaces:
            linux.enter(self.namespaces[self.of(rank, size)], linux.NEWNET)

    def environment(self, rank: int, size: int) -> dict[str, str]:
        """The environment variables that torchrun sets for a process.

        >>> Hosts(("a", "b")).environment(4, 5)
        {'RANK': '4', 'LOCAL_RANK': '1', 'WORLD_SIZE': '5', 'LOCAL_WORLD_SIZE': '2'}
        """
        local_ranks = [other for other in range(size) if self.of(other, size) == self.of(rank, size)]
        place = {
            "RANK": rank,
            "LOCAL_RANK": local_ranks.index(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": len(local_ranks),
        }
        return {name: str(value) for name, value in place.items()}

    def counted(self, rank: int, size: int) -> tuple[int, int] | None:
        """Bytes sent and received by the interface of this rank's host; None except for its first rank."""
        if not self.namespaces or self.environment(rank, size)["LOCAL_RANK"] != "0":
            return None
        return linux.interface_bytes(self.interface)
