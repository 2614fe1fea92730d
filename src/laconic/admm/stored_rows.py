"""X and U of every sample, for mode 'batch'."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.errors import StateError
from laconic.core.turn import mix
from laconic.data.memory import InRam, Memory, check_size, free_ram
from laconic.data.on_disk import OnDisk


class StoredRows:
    """One row [X | U] per sample, encoded by a codec of fixed size, in RAM or in the file `path`."""

    def __init__(self, samples: int, shape: torch.Size, codec: Codec, path: Path | None, seed: int) -> None:
        self.shape, self.codec, self._n, self._seed = shape, codec, shape.numel(), seed
        self._one = codec.nbytes(self._n)
        self.seen = torch.zeros(samples, dtype=torch.bool, device="cpu")
        self.memory: Memory
        if path is None:
            check_size(
                "activations and duals", samples, 2 * self._one, 0, free_ram(), "this machine's free memory"
            )
            self.memory = InRam(samples, 2 * self._one)
        else:
            self.memory = OnDisk(samples, 2 * self._one, path)

    @property
    def nbytes(self) -> int:
        return self.memory.samples * self.memory.nbytes

    def prefetch(self, ids: Tensor) -> None:
        self.memory.prefetch(ids.tolist())

    def read(self, ids: Tensor, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return bool (rows,) of seen samples, and X and U (rows, ...), 0 if unseen."""
        known = self.seen[ids]
        x, u = torch.zeros_like(like), torch.zeros_like(like)
        for row, sample in enumerate(ids.tolist()):
            if known[row]:
                wires = self.memory.read(sample).to(like.device)
                x[row] = self.codec.decode(wires[: self._one], self._n).view(self.shape)
                u[row] = self.codec.decode(wires[self._one :], self._n).view(self.shape)
        return known.to(like.device), x, u

    def write(self, ids: Tensor, x: Tensor, u: Tensor, number: int) -> None:
        for row, sample in enumerate(ids.tolist()):
            key = mix(self._seed, number, sample)
            pair = [self.codec.encode(each[row].contiguous().view(-1), key) for each in (x, u)]
            self.memory.write(sample, torch.cat(pair))
        self.seen[ids] = True

    def state_dict(self) -> dict[str, Tensor]:
        """Return seen, bool (samples,), and rows, uint8 (seen, bytes per sample)."""
        return {"seen": self.seen.clone(), "rows": self.memory.rows(self.seen)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.check(state)
        self.memory.load(state["seen"], state["rows"])
        self.seen.copy_(state["seen"])

    def check(self, state: dict[str, Tensor]) -> None:
        if len(state["rows"]) != int(state["seen"].sum()):
            raise StateError(
                f"the state has {len(state['rows'])} rows for {int(state['seen'].sum())} seen samples: it is"
                " damaged"
            )
        if state["rows"].shape[1] != self.memory.nbytes or len(state["seen"]) != len(self.seen):
            raise StateError(
                f"a saved sample has {state['rows'].shape[1]} bytes, but {self.memory.nbytes} here: the model"
                " has changed"
            )

    def close(self) -> None:
        self.memory.close()
