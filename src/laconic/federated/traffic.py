"""Bytes and refusals by round and client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROUNDS = 1000  # rounds stored in detail
REFUSED = 100  # refused messages of a round stored in detail


@dataclass
class Round:
    """One round. `down`, `up`: bytes by client; `kinds`: the server's messages by kind."""

    number: int
    down: dict[str, int] = field(default_factory=dict)
    up: dict[str, int] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    refused: list[tuple[str, str, str]] = field(default_factory=list)  # client, reason, details


@dataclass
class Traffic:
    """Rounds of a run, the current one last, and totals."""

    rounds: list[Round] = field(default_factory=list)
    down_nbytes: int = 0
    up_nbytes: int = 0
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)  # by client and reason

    def begin(self, number: int) -> None:
        self.rounds.append(Round(number))
        del self.rounds[:-ROUNDS]

    @property
    def now(self) -> Round:
        return self.rounds[-1]

    def sent_down(self, client: str, nbytes: int, kind: str) -> None:
        self.now.down[client] = self.now.down.get(client, 0) + nbytes
        self.now.kinds[kind] += 1
        self.down_nbytes += nbytes

    def came_up(self, client: str, nbytes: int) -> None:
        self.now.up[client] = self.now.up.get(client, 0) + nbytes
        self.up_nbytes += nbytes

    def refuse(self, client: str, reason: str, details: str) -> None:
        if len(self.now.refused) < REFUSED:
            self.now.refused.append((client, reason, details))
        self.refusals[client, reason] += 1

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> Traffic:
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
