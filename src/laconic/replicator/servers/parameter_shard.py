"""ParameterShard: a server's part of one optimiser's tensors."""

from __future__ import annotations

import logging
import pickle
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.core.atomic_file import replacing
from laconic.core.errors import AttachError, StateError
from laconic.core.framing import as_bytes, as_numbers
from laconic.core.layout import Layout
from laconic.exchange.method import lift_codec
from laconic.replicator.servers.optimizer_config import from_config, view
from laconic.strategies.gossip.mixing.coded import coded_matrices

log = logging.getLogger("laconic")


class ParameterShard:
    """Tensors of one optimiser on one server, float32 on the host.

    `staleness`: number of gradients by staleness.
    """

    def __init__(
        self, config: dict[str, Any], initial: Tensor, limit: int, file: Path | None, every: int
    ) -> None:
        self.config = config
        self.layout = Layout.of((name, tuple(shape)) for name, shape in config["tensors"])
        if initial.numel() != self.layout.numel:
            raise AttachError(f"the config has {self.layout.numel} elements, but {initial.numel()} were sent")
        self.flat = initial.clone()
        self.optimizer, self._parameters = from_config(config, self.layout, self.flat)
        self.wires = coded_matrices(lift_codec(config["compressor"]), self.layout, damped=False)
        self.limit, self.file, self.every = limit, file, every
        self.version, self.refused = 0, 0
        self.staleness: Counter[int] = Counter()
        self.lock = threading.Lock()
        self._saved = 0
        if file is not None and file.exists():
            self._load(file)

    @property
    def bytes(self) -> Tensor:
        return as_bytes(self.flat.clone())

    def check_same(self, config: dict[str, Any]) -> None:
        for key in ("class", "members", "tensors", "compressor"):
            if config[key] != self.config[key]:
                raise AttachError(
                    f"workers differ in the optimiser {self.config['name']!r}: its {key} is {config[key]} on"
                    f" one, {self.config[key]} on another; run the same script on all"
                )

    def push(self, groups: Sequence[dict[str, Any]], version: int, wire: Tensor, step: int) -> int | None:
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
        if self.file is None or (self._saved == self.version and self.file.exists()):
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "version": self.version,
            "class": self.config["class"],
            "tensors": self.config["tensors"],
            "flat": self.flat,
            "optimizer": self.optimizer.state_dict(),
        }
        with replacing(self.file) as file:
            torch.save(state, file)
        self._saved = self.version

    def _load(self, file: Path) -> None:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise StateError(
                f"{file} is damaged or no checkpoint: remove it to start from scratch, or use another folder"
            ) from error
        if state["tensors"] != self.config["tensors"]:
            raise StateError(
                f"{file} has other tensors than this optimiser: it is of another model or another number of"
                " servers; use another folder"
            )
        if state.get("class", self.config["class"]) != self.config["class"]:
            raise StateError(
                f"{file} is of {state['class']}, but this optimiser is {self.config['class']}: build that"
                " one, or use another folder"
            )
        self.flat.copy_(state["flat"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = self._saved = int(state["version"])
        log.warning("%s: continues at update %d", file, self.version)


def read_floats(wire: Tensor) -> Tensor:
    return as_numbers(wire, torch.float32)
