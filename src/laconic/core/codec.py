"""Codec: a flat float32 tensor to bytes and back, pure and stateless.

Bytes, length and the codec's own public fields decode everything: there is no hidden context, so any rank,
any process and any later version can read a wire. A message carries several tensors of one buffer
(`Segments`): many small tensors cost one call. By default a message is the tensors' wires one after the
other, led by their lengths where these are not fixed; codecs with faster kernels override the `_segments`
methods.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import WireError
from laconic.core.layout import Layout, Segments
from laconic.core.spec import Spec
from laconic.core.turn import Turn

KEYS = 1 << 64
LARGE = 1 << 20  # elements of a tensor that shows what a codec does to tensors of any size
NORMAL = (2.0**-126, torch.finfo(torch.float32).max)  # numbers of float32 with all of their bits


class Codec(Spec):
    """Turns x float32 (n,) into wire uint8 (m,) and back. x must be finite.

    A codec whose options decide about a property overrides it as one, the others with a class variable.
    """

    @property
    @abstractmethod
    def fixed_size(self) -> bool:
        """Whether `nbytes(n)` is exact, not only an upper bound."""

    @property
    @abstractmethod
    def unbiased(self) -> bool:
        """Whether E[decode(encode(x))] = x, over the keys, for x in the `normal` range."""

    @property
    def lossless(self) -> bool:
        """Whether what is decoded is what was encoded: `omega` is 0 of a large tensor."""
        return self.omega(LARGE) == 0

    @property
    def needs_feedback(self) -> bool:
        """Whether what it loses should be sent later: by default where it is biased."""
        return not self.unbiased

    @abstractmethod
    def encode(self, x: Tensor, key: int = 0) -> Tensor:
        """Wire uint8 (m,) of x float32 (n,). Equal keys give equal bytes. `x` is left as it is.

        Raises `ValueError` for another x, or a key that is not in 0..2^64 - 1 (see `check_input`).
        """

    @abstractmethod
    def decode_add_(self, wire: Tensor, out: Tensor, alpha: float = 1.0) -> Tensor:
        """out (n,) += alpha * decoded wire, in place. Raises `WireError` before any write out of bounds."""

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Bytes of the wire of n elements: exact where `fixed_size`, else the most it can be."""

    @abstractmethod
    def omega(self, n: int) -> float:
        """The least known bound with E|C(x) - x|^2 <= omega * |x|^2 over all x of n elements; inf if none.

        Over those in the `normal` range, that is: outside it there is no such bound.
        """

    @property
    def normal(self) -> tuple[float, float]:
        """The least and the largest |x_i|, beside 0, that `omega` and `unbiased` are about.

        What is smaller is rounded to a fixed grid or to zero; for what is larger the largest number is sent,
        so that with error feedback the rest waits for the next steps.
        """
        return NORMAL

    def absolute_error(self, n: int) -> float | None:
        """A bound on |C(x) - x|^2 that holds for every x of n elements, or None where there is none."""
        return None

    def at(self, step: int) -> Codec:
        """The codec of this step: itself, unless it follows a schedule."""
        return self

    def decode(self, wire: Tensor, n: int) -> Tensor:
        """Decoded float32 (n,). Raises `WireError` for bytes that no encoder can have made."""
        check_vector("wire", wire, torch.uint8)
        arguments.whole("n", n)
        return self.decode_add_(wire, torch.zeros(n, dtype=torch.float32, device=wire.device))

    def clear_(self, wire: Tensor, memory: Tensor) -> Tensor:
        """Set to zero the entries of memory (n,) that this wire carries: all of them, unless sparse."""
        return memory.zero_()

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        """One message uint8 (m,) of these ranges of flat x; `keys` has one key a segment."""
        wires = [self.encode(view, key) for view, key in zip(segments.views(x), keys, strict=True)]
        if self.fixed_size:
            return torch.cat(wires) if wires else x.new_empty(0, dtype=torch.uint8)
        lengths = torch.tensor([wire.numel() for wire in wires], dtype=torch.int32, device=x.device)
        return torch.cat([lengths.view(torch.uint8), *wires])

    def encode_layout(self, x: Tensor, layout: Layout, turn: Turn) -> Tensor:
        """One message of these tensors of flat x, with this rank's own keys: ranks round independently."""
        return self.encode_segments(x, layout.segments, [turn.own(name) for name in layout.names])

    def decode_segments_add_(
        self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1.0
    ) -> Tensor:
        """out[segment] += alpha * decoded, for each segment of a message, in place."""
        for part, view in zip(self._parts(wire, segments), segments.views(out), strict=True):
            self.decode_add_(part, view, alpha)
        return out

    def clear_segments_(self, wire: Tensor, segments: Segments, memory: Tensor) -> Tensor:
        """Set to zero the entries of flat memory that this message carries."""
        for part, view in zip(self._parts(wire, segments), segments.views(memory), strict=True):
            self.clear_(part, view)
        return memory

    def message_nbytes(self, segments: Segments) -> int:
        """Bytes of a message: exact where `fixed_size`, else the most it can be."""
        lengths = 0 if self.fixed_size else 4 * len(segments)
        return lengths + sum(self.nbytes(size) for size in segments.sizes)

    def _parts(self, wire: Tensor, segments: Segments) -> list[Tensor]:
        """The wires inside a message, as views."""
        if self.fixed_size:
            lengths, body = [self.nbytes(size) for size in segments.sizes], wire
        else:
            head = 4 * len(segments)
            if wire.numel() < head:
                raise WireError(
                    f"a message of {len(segments)} tensors starts with {head} bytes, got {wire.numel()}"
                )
            lengths, body = wire[:head].clone().view(torch.int32).tolist(), wire[head:]
        if any(length < 0 for length in lengths) or sum(lengths) != body.numel():
            raise WireError(
                f"{self!r}: the message's wires should fill {sum(lengths)} bytes, got {body.numel()}"
            )
        return list(torch.split(body, lengths)) if lengths else []


def check_input(x: Tensor, key: int) -> None:
    """Raise `ValueError` for what no codec encodes: anything but float32 (n,) and 64 bits of key."""
    check_vector("x", x, torch.float32)
    arguments.whole("key", key, 0, KEYS - 1)


def check_vector(name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Raise `ValueError`, with the call that helps, unless x is a contiguous vector of this dtype.

    >>> check_vector("x", torch.zeros(2, 3), torch.int8)
    Traceback (most recent call last):
    ValueError: x must be a contiguous vector of torch.int8, got torch.float32; x.to(torch.int8) is one
    """
    if not isinstance(x, Tensor):
        got, way_out = type(x).__name__, f"torch.tensor({name}, dtype={dtype})"
    elif x.dtype is not dtype:
        got, way_out = f"{x.dtype}", f"{name}.to({dtype})"
    elif x.dim() != 1:
        got, way_out = f"{dtype} of {tuple(x.shape)}", f"{name}.flatten()"
    elif not x.is_contiguous():
        got, way_out = "a strided one", f"{name}.contiguous()"
    else:
        return
    raise ValueError(f"{name} must be a contiguous vector of {dtype}, got {got}; {way_out} is one")


def check_wire(codec: Codec, wire: Tensor, expected: int) -> None:
    """Raise `WireError` unless the wire has exactly this many bytes."""
    if wire.numel() != expected:
        raise WireError(f"{codec!r}: a wire of {expected} bytes is expected, got {wire.numel()}")
