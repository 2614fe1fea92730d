"""Share: a server's part of one optimiser's tensors. It applies gradients, counts them and saves itself."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.core.errors import AttachError, StateError
from laconic.core.framing import as_bytes, as_numbers
from laconic.core.layout import Layout
from laconic.exchange.method import lift_codec
from laconic.replicator.servers.described import built, view
from laconic.strategies.gossip.mixing.coded import coded_matrices

log = logging.getLogger("laconic")


class Share:
    """The tensors of one optimiser that live on one server, float32 on the host.

    `version`: updates so far. `staleness`: how many were applied at each; `refused`: how many were too old.
    `lock`: for whoever reads or changes them. `file`: where it saves itself each `every` updates, or None.
    """

    def __init__(
        self, told: dict[str, Any], initial: Tensor, limit: int, file: Path | None, every: int
    ) -> None:
        self.told = told
        self.layout = Layout.of((name, tuple(shape)) for name, shape in told["tensors"])
        if initial.numel() != self.layout.numel:
            raise AttachError(f"{self.layout.numel} elements are described, {initial.numel()} came")
        self.flat = initial.clone()
        self.optimizer, self._parameters = built(told, self.layout, self.flat)
        self.wires = coded_matrices(lift_codec(told["compressor"]), self.layout, damped=False)
        self.limit, self.file, self.every = limit, file, every
        self.version, self.refused = 0, 0
        self.staleness: Counter[int] = Counter()
        self.lock = threading.Lock()
        self._saved = 0
        if file is not None and file.exists():
            self._load(file)

    @property
    def bytes(self) -> Tensor:
        """The tensors as they are now, as bytes of their own."""
        return as_bytes(self.flat.clone())

    def check_same(self, told: dict[str, Any]) -> None:
        """Raise `AttachError` unless another worker's words are those of the first."""
        for key in ("class", "members", "tensors", "compressor"):
            if told[key] != self.told[key]:
                raise AttachError(
                    f"workers differ in the optimiser {self.told['name']!r}: its {key} is {told[key]} on one,"
                    f" {self.told[key]} on another; run one script on all"
                )

    def push(self, groups: Sequence[dict[str, Any]], version: int, wire: Tensor, step: int) -> int | None:
        """Apply a gradient of parameters of this version; its staleness, or None if it is refused.

        `groups`: the settings of each group at the worker, whose schedule holds for its gradients.
        """
        staleness = self.version - version
        if staleness > self.limit:
            self.refused += 1
            return None
        grad = self.wires.decode_add_(wire, torch.zeros_like(self.flat), step)
        with torch.no_grad():
            for group, now in zip(self.optimizer.param_groups, groups, strict=True):
                group.update(now)
            for entry in self.layout:
                self._parameters[entry.name].grad = view(grad, entry)
        self.optimizer.step()
        self.version += 1
        self.staleness[staleness] += 1
        if self.file is not None and self.version % self.every == 0:
            self.save()
        return staleness

    def save(self) -> None:
        """Write a checkpoint, under another name first: a crash leaves the old one or the new one whole."""
        if self.file is None or (self._saved == self.version and self.file.exists()):
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "version": self.version,
            "class": self.told["class"],
            "tensors": self.told["tensors"],
            "flat": self.flat,
            "optimizer": self.optimizer.state_dict(),
        }
        temporary = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        with temporary.open("wb") as out:
            torch.save(state, out)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(self.file)
        self._saved = self.version

    def _load(self, file: Path) -> None:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise StateError(
                f"{file} is damaged or no checkpoint: remove it to start anew, or give Replicator another"
                " folder"
            ) from error
        if state["tensors"] != self.told["tensors"]:
            raise StateError(
                f"{file} holds other tensors than this optimiser's: it is of another model or another number"
                " of servers; give Replicator another folder"
            )
        if state.get("class", self.told["class"]) != self.told["class"]:
            raise StateError(
                f"{file} is of {state['class']}, and this optimiser is {self.told['class']}: build that one,"
                " or give Replicator another folder"
            )
        self.flat.copy_(state["flat"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = self._saved = int(state["version"])
        log.warning("%s: goes on at update %d", file, self.version)


def read_floats(wire: Tensor) -> Tensor:
    """Bytes as float32 (n,)."""
    return as_numbers(wire, torch.float32)
