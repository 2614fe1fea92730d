"""Cache of updates for clients that missed rounds: the shortest of three exact messages.

    updates   the updates of all missed rounds, in order, while they are cached
    entries   positions and values of the entries changed since that version; an int32 per entry stores its
              last change
    whole     the model

Sattler et al. 2019 (arXiv:1903.02891) send sums of the missed updates. Floating-point sums depend on the
order, so the last bits would vary by client.
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
    """Last updates, at most `most_nbytes`, and the version of each entry's last change, from 1."""

    def __init__(self, n: int, most_nbytes: int) -> None:
        self._changed = torch.zeros(n, dtype=torch.int32, device="cpu")
        self._updates: deque[tuple[int, Tensor]] = deque()
        self._most_nbytes = most_nbytes

    def add(self, version: int, update: Tensor | None, changed: Tensor) -> None:
        """Add an update uint8 (m,), or None for a whole model, and the changed entries, bool (n,)."""
        self._changed[changed] = version
        if update is None:
            self._updates.clear()
            return
        self._updates.append((version, update))
        while sum(each.numel() for _, each in self._updates) > self._most_nbytes:
            self._updates.popleft()

    def since(self, base: int, version: int, model: Tensor) -> tuple[Kind, Tensor]:
        """Return the shortest body that turns version `base` (0: no model) into the model float32 (n,)."""
        found = [(Kind.WHOLE, as_bytes(model))]
        if base > 0:
            missed = [(number, each) for number, each in self._updates if number > base]
            if all_kept := len(missed) == version - base:
                found.append((Kind.UPDATES, _packed(missed)))
            one = all_kept and len(missed) == 1  # smaller than its entries in float32
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
        return {"changed": self._changed.clone(), "updates": list(self._updates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
    """Return the updates of versions base + 1 to version. Raises `WireError`."""
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
    """Write a body's entries to the model float32 (n,). Raises `WireError` before any write."""
    whole = Segments.whole(model.numel())
    counts, rest = read_counts(body, whole)
    positions, rest = read_positions(rest)
    indices = GOLOMB.decode(positions, counts, whole)
    if rest.numel() != 4 * indices.numel():
        raise WireError(f"{indices.numel()} values fill {4 * indices.numel()} bytes, got {rest.numel()}")
    model[indices.long()] = as_numbers(rest, torch.float32)
    return model
