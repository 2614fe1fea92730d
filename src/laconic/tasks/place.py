"""Where a worker of this machine runs: with all others on the loopback interface, or on a host of a lab.

`laconic lab -- laconic train ...` says in LACONIC_LAB which network namespaces stand for hosts. Workers are
spread over them in blocks, as torchrun spreads ranks over machines.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass

from laconic.core import linux

LAB = "LACONIC_LAB"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Hosts:
    """The hosts that workers are spread over. `namespaces`: files of theirs; none but in a lab."""

    addresses: tuple[str, ...] = ("127.0.0.1",)
    interface: str = LOOPBACK
    namespaces: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> Hosts:
        """What this process's environment says."""
        if LAB not in os.environ:
            return cls()
        told = json.loads(os.environ[LAB])
        return cls(tuple(told["addresses"]), told["interface"], tuple(told["namespaces"]))

    def of(self, rank: int, size: int) -> int:
        """The host of a rank.

        >>> [Hosts(("a", "b")).of(rank, 5) for rank in range(5)]
        [0, 0, 0, 1, 1]
        """
        return rank * len(self.addresses) // size

    def enter(self, rank: int, size: int) -> None:
        """Go there: sockets that are opened from now on are those of the rank's host."""
        if self.namespaces:
            linux.enter(self.namespaces[self.of(rank, size)], linux.NEWNET)

    def environment(self, rank: int, size: int) -> dict[str, str]:
        """What torchrun tells a process.

        >>> Hosts(("a", "b")).environment(4, 5)
        {'RANK': '4', 'LOCAL_RANK': '1', 'WORLD_SIZE': '5', 'LOCAL_WORLD_SIZE': '2'}
        """
        together = [other for other in range(size) if self.of(other, size) == self.of(rank, size)]
        place = {
            "RANK": rank,
            "LOCAL_RANK": together.index(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": len(together),
        }
        return {name: str(value) for name, value in place.items()}

    def counted(self, rank: int, size: int) -> tuple[int, int] | None:
        """Bytes that the interface of this rank's host has sent and received; None: another tells."""
        if not self.namespaces or self.environment(rank, size)["LOCAL_RANK"] != "0":
            return None
        return linux.interface_bytes(self.interface)
