"""Bytes by round and client, up and down, as the messages were sent, and what was refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Round:
    """One round. `down` and `up`: bytes by client; `kinds`: how many messages of each kind came down."""

    number: int
    down: dict[str, int] = field(default_factory=dict)
    up: dict[str, int] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    refused: list[tuple[str, str, str]] = field(default_factory=list)  # client, reason, details


@dataclass
class Traffic:
    """All rounds of a run, the present one last."""

    rounds: list[Round] = field(default_factory=list)

    def begin(self, number: int) -> None:
        """Start a round."""
        self.rounds.append(Round(number))

    @property
    def now(self) -> Round:
        """The present round."""
        return self.rounds[-1]

    def sent_down(self, client: str, nbytes: int, kind: str) -> None:
        """Count a message to a client."""
        self.now.down[client] = self.now.down.get(client, 0) + nbytes
        self.now.kinds[kind] += 1

    def came_up(self, client: str, nbytes: int) -> None:
        """Count a message from a client, taken or refused."""
        self.now.up[client] = self.now.up.get(client, 0) + nbytes

    def refuse(self, client: str, reason: str, details: str) -> None:
        """Note a refused message."""
        self.now.refused.append((client, reason, details))

    @property
    def down_nbytes(self) -> int:
        """Bytes that the server has sent to all clients."""
        return sum(sum(each.down.values()) for each in self.rounds)

    @property
    def up_nbytes(self) -> int:
        """Bytes that all clients have sent to the server."""
        return sum(sum(each.up.values()) for each in self.rounds)

    @property
    def refusals(self) -> Counter[tuple[str, str]]:
        """How often each client was refused, for each reason."""
        return Counter((client, reason) for each in self.rounds for client, reason, _ in each.refused)

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> Traffic:
        """What `as_dict` gave."""
        return cls(
            [
                Round(
                    each["round"],
                    dict(each["down"]),
                    dict(each["up"]),
                    Counter(each["kinds"]),
                    [(client, reason, details) for client, reason, details in each["refused"]],
                )
                for each in saved["rounds"]
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {
            "down_nbytes": self.down_nbytes,
            "up_nbytes": self.up_nbytes,
            "rounds": [
                {
                    "round": each.number,
                    "down": dict(each.down),
                    "up": dict(each.up),
                    "kinds": dict(each.kinds),
                    "refused": list(each.refused),
                }
                for each in self.rounds
            ],
        }
