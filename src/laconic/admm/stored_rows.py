"""Kept: X and U of every sample, for mode 'batch'."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.errors import StateError
from laconic.core.turn import mix
from laconic.data.memory import InRam, Memory, check_size, free_ram
from laconic.data.on_disk import OnDisk


class Kept:
    """One row for each sample, [X | U] by a codec of fixed size; in RAM, or in a file of a folder.

    Args:
        samples: How many, with ids 0..samples - 1.
        shape: Of a sample's X.
        codec: Of fixed size.
        path: The file; None: in RAM.

    Raises:
        StateError, OSError: There is no room.
    """

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
        """Of all rows, seen or not."""
        return self.memory.samples * self.memory.nbytes

    def prefetch(self, ids: Tensor) -> None:
        """These are read soon."""
        self.memory.prefetch(ids.tolist())

    def read(self, ids: Tensor, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """bool (rows,) which were seen, and X, U (rows, ...) of those on the device of `like`, else zero."""
        known = self.seen[ids]
        x, u = torch.zeros_like(like), torch.zeros_like(like)
        for row, sample in enumerate(ids.tolist()):
            if known[row]:
                wires = self.memory.read(sample).to(like.device)
                x[row] = self.codec.decode(wires[: self._one], self._n).view(self.shape)
                u[row] = self.codec.decode(wires[self._one :], self._n).view(self.shape)
        return known.to(like.device), x, u

    def write(self, ids: Tensor, x: Tensor, u: Tensor, number: int) -> None:
        """Keep X and U (rows, ...) of these samples. Raises `OSError` if the disk is full."""
        for row, sample in enumerate(ids.tolist()):
            key = mix(self._seed, number, sample)
            pair = [self.codec.encode(each[row].contiguous().view(-1), key) for each in (x, u)]
            self.memory.write(sample, torch.cat(pair))
        self.seen[ids] = True

    def state_dict(self) -> dict[str, Tensor]:
        """bool (samples,), and uint8 (seen samples, bytes of one)."""
        return {"seen": self.seen.clone(), "rows": self.memory.rows(self.seen)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from here. Raises `StateError` as `check`."""
        self.check(state)
        self.memory.load(state["seen"], state["rows"])
        self.seen.copy_(state["seen"])

    def check(self, state: dict[str, Tensor]) -> None:
        """Raise `StateError` for rows of another size or number."""
        if len(state["rows"]) != int(state["seen"].sum()):
            raise StateError("there is a saved row for each sample that was seen: the state is damaged")
        if state["rows"].shape[1] != self.memory.nbytes or len(state["seen"]) != len(self.seen):
            raise StateError(
                f"a saved sample fills {state['rows'].shape[1]} bytes, here {self.memory.nbytes}: the model"
                " has changed"
            )

    def close(self) -> None:
        """Free the rows."""
        self.memory.close()
