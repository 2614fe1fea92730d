"""Base class of codecs that encode one tensor at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.errors import WireError
from laconic.core.framing import counts_bytes, read_bytes, unsigned
from laconic.core.layout import Segments


class TensorCodec(Codec):
    """Codec of one tensor at a time. A kernel for many tensors belongs in a `Codec`.

    A message is the concatenation of the tensors' wires, after their lengths uint32 (s,) if several have
    varying size.
    """

    @abstractmethod
    def encode_tensor(self, x: Tensor, key: int) -> Tensor:
        """Encode one tensor, as in `encode`. `key` is the only source of randomness; do not modify x."""

    @abstractmethod
    def decode_tensor(self, wire: Tensor, n: int) -> Tensor:
        """Decode one tensor, as in `decode`, to values (n,) of any dtype.

        `wire` is a copy aligned for any dtype, with `nbytes(n)` bytes if `fixed_size`.
        """

    def message_nbytes(self, segments: Segments) -> int:
        return self._head(segments) + super().message_nbytes(segments)

    @final
    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        wires = [self.encode_tensor(view, key) for view, key in zip(segments.views(x), keys, strict=True)]
        if self._head(segments):
            lengths = torch.tensor([wire.numel() for wire in wires], dtype=torch.int64, device="cpu")
            wires.insert(0, counts_bytes(lengths).to(x.device))
        return torch.cat([x.new_empty(0, dtype=torch.uint8), *wires])

    @final
    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        self.check_size(wire, segments)
        found = []
        for part, n in zip(self._wires(wire, segments), segments.sizes, strict=True):
            values = self.decode_tensor(part.clone(), n)
            if values.shape != (n,):
                raise WireError(f"{self!r}: {n} values are expected, got {tuple(values.shape)}")
            found.append(values)
        finite = [values.isfinite().all() for values in found]
        if finite and not bool(torch.stack(finite).all()):
            raise WireError(f"{self!r}: a wire holds NaN or Inf; only finite numbers are sent")
        for values, view in zip(found, segments.views(out), strict=True):
            view.add_(values, alpha=alpha)
        return out

    def _head(self, segments: Segments) -> int:
        return 4 * len(segments) if len(segments) > 1 and not self.fixed_size else 0

    def _wires(self, wire: Tensor, segments: Segments) -> Sequence[Tensor]:
        if self.fixed_size:
            lengths = [self.nbytes(size) for size in segments.sizes]
        elif len(segments) == 1:
            lengths = [wire.numel()]
        else:
            head, wire = read_bytes(wire, self._head(segments), "the lengths of the wires")
            lengths = unsigned(head).tolist()
        if sum(lengths) != wire.numel():
            raise WireError(f"{self!r}: wires of {lengths} bytes do not fill {wire.numel()} bytes")
        return torch.split(wire, lengths) if lengths else ()
