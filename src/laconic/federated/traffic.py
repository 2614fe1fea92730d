"""Bytes by round and client, up and down, as the messages were sent, and what was refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROUNDS = 1000  # that are kept one by one
REFUSED = 100  # messages of a round whose details are kept


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
    """The rounds of a run, the present one last, and what all of them come to.

    Its memory has a bound: of rounds before the last `ROUNDS`, and of messages after the first `REFUSED` that
    a round has refused, only the counts stay.
    """

    rounds: list[Round] = field(default_factory=list)
    down_nbytes: int = 0  # that the server has sent to all clients
    up_nbytes: int = 0  # that all clients have sent to the server
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)  # by client and reason

    def begin(self, number: int) -> None:
        """Start a round."""
        self.rounds.append(Round(number))
        del self.rounds[:-ROUNDS]

    @property
    def now(self) -> Round:
        """The present round."""
        return self.rounds[-1]

    def sent_down(self, client: str, nbytes: int, kind: str) -> None:
        """Count a message to a client."""
        self.now.down[client] = self.now.down.get(client, 0) + nbytes
        self.now.kinds[kind] += 1
        self.down_nbytes += nbytes

    def came_up(self, client: str, nbytes: int) -> None:
        """Count a message from a client, taken or refused."""
        self.now.up[client] = self.now.up.get(client, 0) + nbytes
        self.up_nbytes += nbytes

    def refuse(self, client: str, reason: str, details: str) -> None:
        """Note a refused message."""
        if len(self.now.refused) < REFUSED:
            self.now.refused.append((client, reason, details))
        self.refusals[client, reason] += 1

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
            ],
            saved["down_nbytes"],
            saved["up_nbytes"],
            Counter({(client, reason): times for client, reason, times in saved["refusals"]}),
        )

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {
            "down_nbytes": self.down_nbytes,
            "up_nbytes": self.up_nbytes,
            "refusals": [[client, reason, times] for (client, reason), times in self.refusals.items()],
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
