"""One message for the parts of a layout, each with its own codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.errors import WireError
from laconic.core.framing import counts_bytes, read_bytes, unsigned
from laconic.core.layout import Layout
from laconic.core.turn import Turn


@dataclass(frozen=True)
class Part:
    """Tensors of a layout and their codec; decoded values are multiplied by `gain`."""

    layout: Layout
    codec: Codec
    gain: float = 1.0


@dataclass(frozen=True)
class LayoutCodec:
    """Codec of flat float32 tensors (n,), part by part.

    Wire: if `framed`, the length of each part's message, uint32 (p,); then the messages. Unframed, at most
    one codec may have variable size.
    """

    parts: Sequence[Part]
    framed: bool = False

    @cached_property
    def nbytes(self) -> int | None:
        return sum(self._sizes) if all(part.codec.fixed_size for part in self.parts) else None

    @property
    def most_nbytes(self) -> int:
        return sum(self._sizes) + 4 * len(self.parts) * self.framed

    def encode(self, x: Tensor, turn: Turn) -> Tensor:
        wires = [part.codec.at(turn.step).encode_layout(x, part.layout, turn) for part in self.parts]
        if self.framed:
            sizes = torch.tensor([wire.numel() for wire in wires], dtype=torch.int64, device="cpu")
            wires.insert(0, counts_bytes(sizes))
        return torch.cat(wires)

    def decode_add_(self, wire: Tensor, out: Tensor, step: int, alpha: float = 1.0) -> Tensor:
        """Add alpha * the decoded message to out (n,). A `WireError` may come after some parts were added."""
        for part, piece in zip(self.parts, self._pieces(wire), strict=True):
            codec = part.codec.at(step)
            codec.decode_segments_add_(piece, part.layout.segments, out, alpha * part.gain)
        return out

    @cached_property
    def _sizes(self) -> list[int]:
        return [part.codec.message_nbytes(part.layout.segments) for part in self.parts]

    def _pieces(self, wire: Tensor) -> Sequence[Tensor]:
        if self.framed:
            head, rest = read_bytes(wire, 4 * len(self.parts), "the lengths of the parts")
            lengths = unsigned(head).tolist()
            if sum(lengths) != rest.numel():
                raise WireError(f"parts of {lengths} bytes do not fill {rest.numel()} bytes")
            return torch.split(rest, lengths)
        lengths = list(self._sizes)
        varies = next((i for i, part in enumerate(self.parts) if not part.codec.fixed_size), 0)
        lengths[varies] = 0
        if wire.numel() < sum(lengths):
            raise WireError(f"a message must have at least {sum(lengths)} bytes, got {wire.numel()}")
        lengths[varies] = wire.numel() - sum(lengths)
        return torch.split(wire, lengths)
