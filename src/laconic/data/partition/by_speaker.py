"""Partition by speaker: each speaker of a text is a client and has their own lines.

McMahan et al. 2017, arXiv:1602.05629: the roles of Shakespeare's plays are clients, with two lines or more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import Status
from laconic.data.draws import order
from laconic.data.partition import Partition

FEW = ("leave", "join")


@dataclass(frozen=True, repr=False)
class BySpeaker(Partition):
    """Every speaker with at least `least` examples is a client, in the order of their numbers.

    If fewer clients are requested, they are drawn at random.

    Args:
        least: Minimum number of a client's examples, 1 or more.
        few: Treatment of speakers with fewer. 'leave': not assigned. 'join': consecutive ones form clients
            of at least `least` examples, after the others; a rest joins the last.

    >>> from laconic.core.spec import parse
    >>> speakers = [0, 0, 0, 1, 2, 2, 3]
    >>> [share.tolist() for share in parse("by_speaker()").deal(speakers)]
    [[0, 1, 2], [4, 5]]
    >>> [share.tolist() for share in parse("by_speaker(few='join')").deal(speakers)]
    [[0, 1, 2], [4, 5], [3, 6]]
    """

    least: int = 2
    few: str = "leave"

    complete: ClassVar[bool] = False
    deals_by: ClassVar[Literal["labels", "speakers"]] = "speakers"
    paper: ClassVar[str] = "McMahan et al. 2017, arXiv:1602.05629"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("by_speaker()", "by_speaker(least=20, few='join')")

    def __post_init__(self) -> None:
        arguments.whole("by_speaker: least", self.least, least=1)
        arguments.choice("by_speaker: few", self.few, FEW)

    def number(self, kinds: Tensor, clients: int | None) -> int:
        there = len(self.groups(kinds))
        if not there:
            raise SpecError(
                f"{self!r}: no speaker has {self.least} examples; the longest part has"
                f" {max(lengths(kinds))}: lower least"
            )
        if clients is None:
            return there
        arguments.whole("clients", clients, 1)
        if clients > there:
            raise SpecError(
                f"{self!r}: clients must be at most {there}, the number of speakers, got {clients};"
                " omit it to use all, or lower least"
            )
        return clients

    def shares(self, kinds: Tensor, clients: int, seed: int) -> list[Tensor]:
        groups = self.groups(kinds)
        drawn = order(self.key(seed), len(groups))[:clients].sort().values
        return [groups[group] for group in drawn.tolist()]

    def groups(self, kinds: Tensor) -> list[Tensor]:
        parts = torch.split(kinds.argsort(stable=True), lengths(kinds))
        found = [part for part in parts if len(part) >= self.least]
        if self.few == "leave":
            return found
        waiting: list[Tensor] = []
        for part in parts:
            if len(part) < self.least:
                waiting.append(part)
            if sum(map(len, waiting)) >= self.least:
                found.append(torch.cat(waiting).sort().values)
                waiting = []
        if waiting and found:
            found[-1] = torch.cat([found[-1], *waiting]).sort().values
        return found


def lengths(kinds: Tensor) -> list[int]:
    counts: list[int] = np.unique(kinds.numpy(), return_counts=True)[1].tolist()
    return counts
