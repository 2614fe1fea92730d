"""Hosts of this machine's workers: loopback, or a lab's, from LACONIC_LAB."""

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
    addresses: tuple[str, ...] = ("127.0.0.1",)
    interface: str = LOOPBACK
    namespaces: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> Hosts:
        if LAB not in os.environ:
            return cls()
        lab = json.loads(os.environ[LAB])
        return cls(tuple(lab["addresses"]), lab["interface"], tuple(lab["namespaces"]))

    def of(self, rank: int, size: int) -> int:
        """Return the host of a rank.

        >>> [Hosts(("a", "b")).of(rank, 5) for rank in range(5)]
        [0, 0, 0, 1, 1]
        """
        return rank * len(self.addresses) // size

    def enter(self, rank: int, size: int) -> None:
        if self.namespaces:
            linux.enter(self.namespaces[self.of(rank, size)], linux.NEWNET)

    def environment(self, rank: int, size: int) -> dict[str, str]:
        """Return torchrun's environment variables.

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
        """Return the interface's sent and received bytes, for a host's first rank."""
        if not self.namespaces or self.environment(rank, size)["LOCAL_RANK"] != "0":
            return None
        return linux.interface_bytes(self.interface)
