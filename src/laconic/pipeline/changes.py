"""Channel of `change(codec)`: one side's buffer of samples and its updates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laconic.codecs.dense import Dense
from laconic.core.codec import Codec
from laconic.core.errors import WireError
from laconic.core.framing import as_bytes, unsigned
from laconic.data.memory import Memory
from laconic.pipeline.buffer import Buffer
from laconic.pipeline.channel import Channel, Coded, Plain, Visit, as_vector, check_finite
from laconic.pipeline.codings.change import Change

OpenMemory = Callable[[str, int], Memory]  # boundary name, bytes per row


class Changes(Channel):
    """State m[sample] of each sample, stored in the codec `keep`.

    Body: the samples' wires, preceded by their lengths, uint32 (rows,), unless both codecs have fixed sizes.
    Both sides store keep.encode(m + decoded change), bit-identical. If the step can still fail,
    `buffer.settle` stores it.
    """

    def __init__(
        self,
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        seed: int,
        change: Change,
        keep: Codec,
        samples: int,
        memory: OpenMemory,
    ) -> None:
        super().__init__(name, shape, dtype, seed)
        self.change, self.keep = change, keep
        self.rows, self.n = (shape[0] if shape else 1), shape[1:].numel()  # samples, elements per sample
        self.row_bytes = keep.nbytes(self.n)
        self.buffer = Buffer(samples, lambda: memory(name, self.row_bytes))

    @property
    def fixed(self) -> bool:
        return self.change.codec.fixed_size and self.change.first_codec.fixed_size

    @property
    def most(self) -> int:
        longest = max(self.change.codec.nbytes(self.n), self.change.first_codec.nbytes(self.n))
        return self.rows * (longest + 4)

    def room(self, visit: Visit) -> int:
        new = self.rows - int(self._known(visit).sum())
        old = self.rows - new
        wires = new * self.change.first_codec.nbytes(self.n) + old * self.change.codec.nbytes(self.n)
        return wires + (0 if self.fixed else 4 * self.rows)

    def agreed(self, visit: Visit) -> tuple[bytes | str, ...]:
        alike = super().agreed(visit)
        if not visit.training or visit.ids is None:
            return alike
        known = self._known(visit).numpy().tobytes()
        return *alike, visit.ids.numpy().tobytes(), known, self.buffer.version

    def encode(self, x: Tensor, visit: Visit) -> Tensor:
        check_finite(x)
        wires, values = [], []
        for i, (row, known) in enumerate(zip(x, self._known(visit).tolist(), strict=True)):
            sample, a = self._sample(visit, i), self._vector(row)
            if known:
                m = self._recall(sample, x.device)
                wire = self.change.codec.encode(a - m, self.key(visit, sample))
                values.append(self.change.codec.decode_add_(wire, m))
            else:
                wire = self.change.first_codec.encode(a, self.key(visit, sample))
                values.append(self.change.first_codec.decode(wire, self.n))
            wires.append(wire)
        if not self.fixed:
            lengths = as_bytes(
                torch.tensor([wire.numel() for wire in wires], dtype=torch.int32, device="cpu")
            )
            wires.insert(0, lengths.to(x.device))
        body = torch.cat(wires)
        self._remember(values, visit, body)
        return body

    def decode_(self, body: Tensor, out: Tensor, visit: Visit) -> None:
        known = self._known(visit).tolist()
        values = []
        for i, (wire, old) in enumerate(zip(self._wires(body, known), known, strict=True)):
            if old:
                m = self._recall(self._sample(visit, i), out.device)
                values.append(self.change.codec.decode_add_(wire, m))
            else:
                values.append(self.change.first_codec.decode(wire, self.n))
        for i, value in enumerate(self._remember(values, visit, body)):
            self._along(out[i]).copy_(value.view(self._along(out[i]).shape))

    def _known(self, visit: Visit) -> Tensor:
        if not visit.training:
            return torch.zeros(self.rows, dtype=torch.bool, device="cpu")
        assert visit.ids is not None
        return self.buffer.seen[visit.ids]

    def _sample(self, visit: Visit, row: int) -> int:
        return row if visit.ids is None or not visit.training else int(visit.ids[row])

    def _along(self, row: Tensor) -> Tensor:
        return row.movedim(-1, 0) if self.change.along == "channels" and row.dim() > 1 else row

    def _vector(self, row: Tensor) -> Tensor:
        return as_vector(self._along(row))

    def _recall(self, sample: int, device: torch.device) -> Tensor:
        return self.keep.decode(self.buffer.memory.read(sample).to(device), self.n)

    def _remember(self, values: list[Tensor], visit: Visit, body: Tensor) -> list[Tensor]:
        """Return the values as stored, perhaps rounded by `keep`."""
        if not visit.training or visit.ids is None:
            return values
        samples = visit.ids.tolist()
        rows = [
            self.keep.encode(value, self.key(visit, sample))
            for sample, value in zip(samples, values, strict=True)
        ]
        self.buffer.draft(visit.micro, visit.ids, rows, body)
        if not visit.may_fail:
            self.buffer.settle()
        return values if self.keep.lossless else [self.keep.decode(row, self.n) for row in rows]

    def _wires(self, body: Tensor, known: list[bool]) -> list[Tensor]:
        sizes = [(self.change.codec if old else self.change.first_codec).nbytes(self.n) for old in known]
        if not self.fixed:
            head, body = body[: 4 * len(known)], body[4 * len(known) :]
            if head.numel() < 4 * len(known):
                raise WireError(f"the lengths of {len(known)} wires take {4 * len(known)} bytes")
            sizes = unsigned(head).tolist()
        if sum(sizes) != body.numel():
            raise WireError(f"expected wires of {sum(sizes)} bytes, got {body.numel()}")
        return list(torch.split(body, sizes))


def channel_of(
    coding: Codec | Change,
    name: str,
    shape: torch.Size,
    dtype: torch.dtype,
    seed: int,
    keep: Codec,
    samples: int,
    memory: OpenMemory,
) -> Channel:
    if isinstance(coding, Change):
        return Changes(name, shape, dtype, seed, coding, keep, samples, memory)
    if isinstance(coding, Dense):
        return Plain(name, shape, dtype, seed)
    return Coded(name, shape, dtype, seed, coding)
