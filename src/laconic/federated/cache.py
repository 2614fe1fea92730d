"""What a client needs that has missed rounds: the shortest of three messages, each exact bit for bit.

Sattler et al. 2019 (arXiv:1903.02891) keep partial sums P(s) of the last s answers, for each s. A sum of
floats is not what adding them one after the other gives: clients would drift apart in their last bits. So:

    updates   the answers of all missed rounds, one after the other, while they are kept
    entries   where the model has changed since that version, and its values there: one int32 an entry says
              when it changed last, which serves an absence of any length
    whole     the model

The first is shortest for a few rounds, the second for some, and none is longer than the model.

For signs the paper sends the sum of those of s rounds, log2(2 s + 1) bits an entry, which needs one step size
for all rounds. Our sign codecs send magnitudes with each answer, and a sum of signs does not tell which of
them an entry got. So `sign` and `signmean` take the same three forms: s bits an entry, up to the model's 32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.codecs.indices.golomb import GOLOMB
from laconic.core.errors import WireError
from laconic.core.framing import (
    as_bytes,
    as_numbers,
    counts_bytes,
    read_bytes,
    read_counts,
    read_positions,
    unsigned,
)
from laconic.core.layout import Segments
from laconic.federated.message import Kind


class Cache:
    """The server's last answers, and when each of n entries changed last. Versions count from 1.

    Memory: 4 bytes an entry, and answers of at most `most_nbytes` together.
    """

    def __init__(self, n: int, most_nbytes: int) -> None:
        self._changed = torch.zeros(n, dtype=torch.int32, device="cpu")
        self._updates: deque[tuple[int, Tensor]] = deque()
        self._most_nbytes = most_nbytes

    def add(self, version: int, update: Tensor | None, changed: Tensor) -> None:
        """Note an answer, uint8 (m,), None for one that is sent whole; and what changed, bool (n,)."""
        self._changed[changed] = version
        if update is None:
            self._updates.clear()
            return
        self._updates.append((version, update))
        while sum(each.numel() for _, each in self._updates) > self._most_nbytes:
            self._updates.popleft()

    def since(self, base: int, version: int, model: Tensor) -> tuple[Kind, Tensor]:
        """The shortest body that makes the model of version `base` (0: of nobody) this one.

        Args:
            model: float32 (n,), of version `version`.
        """
        found = [(Kind.WHOLE, as_bytes(model))]
        if base > 0:
            missed = [(number, each) for number, each in self._updates if number > base]
            if all_kept := len(missed) == version - base:
                found.append((Kind.UPDATES, _packed(missed)))
            one = all_kept and len(missed) == 1  # a codec's answer is shorter than its entries in float32
            if not one and (entries := self._entries(base, model)) is not None:
                found.append((Kind.ENTRIES, entries))
        return min(found, key=lambda each: each[1].numel())

    def _entries(self, base: int, model: Tensor) -> Tensor | None:
        indices = (self._changed > base).nonzero().flatten().to(torch.int32)
        if 4 * indices.numel() >= 4 * model.numel():
            return None
        whole, count = (
            Segments.whole(model.numel()),
            torch.tensor([indices.numel()], dtype=torch.int64, device="cpu"),
        )
        positions = GOLOMB.encode(indices, count, whole)
        head = counts_bytes(
            torch.cat([count, torch.tensor([positions.numel()], dtype=torch.int64, device="cpu")])
        )
        return torch.cat([head, positions, as_bytes(model[indices.long()])])

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {"changed": self._changed.clone(), "updates": list(self._updates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._changed.copy_(state["changed"])
        self._updates = deque((int(number), update) for number, update in state["updates"])


def _packed(updates: list[tuple[int, Tensor]]) -> Tensor:
    lengths = counts_bytes(
        torch.tensor(
            [len(updates), *(update.numel() for _, update in updates)], dtype=torch.int64, device="cpu"
        )
    )
    return torch.cat([lengths, *(update for _, update in updates)])


def read_updates(body: Tensor, base: int, version: int) -> list[tuple[int, Tensor]]:
    """The answers of versions base + 1 to version. Raises `WireError` for another number of them."""
    head, rest = read_bytes(body, 4, "the number of updates")
    count = int(unsigned(head))
    if count != version - base:
        raise WireError(f"{version - base} updates lead from version {base} to {version}, got {count}")
    head, rest = read_bytes(rest, 4 * count, "the lengths of the updates")
    lengths = unsigned(head).tolist()
    if sum(lengths) != rest.numel():
        raise WireError(f"updates of {lengths} bytes do not fill {rest.numel()} bytes")
    return list(enumerate(torch.split(rest, lengths) if lengths else (), start=base + 1))


def write_entries_(body: Tensor, model: Tensor) -> Tensor:
    """Write the entries of a body to model float32 (n,), in place. Raises `WireError` before it writes."""
    whole = Segments.whole(model.numel())
    counts, rest = read_counts(body, whole)
    positions, rest = read_positions(rest)
    indices = GOLOMB.decode(positions, counts, whole)
    if rest.numel() != 4 * indices.numel():
        raise WireError(f"{indices.numel()} values fill {4 * indices.numel()} bytes, got {rest.numel()}")
    model[indices.long()] = as_numbers(rest, torch.float32)
    return model
