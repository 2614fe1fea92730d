"""Codec: converts ranges of a flat float32 buffer to one message of bytes and back, pure and stateless."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.deferred import numbering
from laconic.core.errors import WireError
from laconic.core.layout import Layout, Segments
from laconic.core.spec import Spec
from laconic.core.turn import Turn

KEYS = 1 << 64
LARGE = 1 << 20
NORMAL = (2.0**-126, torch.finfo(torch.float32).max)  # normal float32 numbers


class Carried(NamedTuple):
    """Entries of a sparse message: values float32 (K,) at indices int32 (K,) from their segment's start.

    counts int64 (s,), on the CPU: entries per segment. positions int64 (K,) in the flat buffer, or None.
    """

    indices: Tensor
    counts: Tensor
    values: Tensor
    positions: Tensor | None


class Codec(Spec):
    """Conversion of finite x float32 (n,) to wire uint8 (m,) and back.

    Bytes, length and the codec's public fields decode everything. A message contains several tensors of one
    buffer (`Segments`). A codec implements `encode_segments`, `decode_segments_add_`, `nbytes`, `omega` and
    `unbiased`, or derives from `TensorCodec`. Properties that depend on no option are class variables.
    """

    @property
    @abstractmethod
    def unbiased(self) -> bool:
        """Whether E[decode(encode(x))] = x, over the keys, for `normal` x."""

    @abstractmethod
    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        """Encode these ranges of a flat buffer as one message uint8 (m,). Equal keys give equal bytes.

        Args:
            x: float32 (n,), unchanged.
            segments: the ranges of x, one per tensor.
            keys: one key in 0..2^64 - 1 per segment, for random codecs.
        """

    @abstractmethod
    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        """Add alpha times the decoded message to these ranges of `out`, in place; return `out`.

        Args:
            wire: the message, uint8 (m,), not trusted.
            segments: the ranges, with the sizes that were encoded.
            out: float32 (n,). Only the ranges change.
            alpha: factor of the decoded values.

        Raises:
            WireError: for bytes that no encoder can have produced, or NaN or Inf, before any write.
        """

    def decode_messages_add_(
        self, messages: Sequence[tuple[Tensor, Segments]], out: Tensor, alpha: float = 1
    ) -> Tensor:
        """Add alpha times each message to flat `out`, in order, in place; return `out`.

        Override it to decode several messages in one launch.

        Args:
            messages: wires uint8 (m,), each with its ranges of `out`.
            out: float32 (n,).
            alpha: factor of the decoded values.

        Raises:
            WireError: for invalid bytes; its `message` is the message's number. Earlier messages may have
                been added.
        """
        for number, (wire, segments) in enumerate(messages):
            with numbering(number):
                if segments.numel:
                    self.decode_segments_add_(wire, segments, out, alpha)
        return out

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Return the bytes of the wire of n elements: exact if `fixed_size`, else an upper bound."""

    @abstractmethod
    def omega(self, n: int) -> float:
        """Return the least known omega with E|C(x) - x|^2 <= omega * |x|^2 for `normal` x, or inf."""

    @property
    def fixed_size(self) -> bool:
        """Whether `nbytes(n)` is exact. Default: True."""
        return True

    @property
    def scale_decides_size(self) -> bool:
        """Whether a message's length depends on the scale of x."""
        return False

    @property
    def lossless(self) -> bool:
        """Whether `omega` of a large tensor is 0."""
        return self.omega(LARGE) == 0

    @property
    def needs_feedback(self) -> bool:
        """Whether the coding error should be sent later. Default: if biased."""
        return not self.unbiased

    @property
    def normal(self) -> tuple[float, float]:
        """The smallest nonzero and the largest |x_i| for which `omega` and `unbiased` hold.

        Smaller values are rounded to a grid or to zero. Larger values saturate.
        """
        return NORMAL

    @property
    def concatenates(self) -> bool:
        """Whether a message, of fixed size, concatenates its tensors' wires. Default: False."""
        return False

    def absolute_error(self, n: int) -> float | None:
        """Return a bound on |C(x) - x|^2 for every x of n elements, or None."""
        return None

    def at(self, step: int) -> Codec:
        """Return the codec of this step: itself without a schedule, which ends at `warm_at`."""
        return self

    def message_nbytes(self, segments: Segments) -> int:
        """Return the bytes of a message, exact or a bound like `nbytes`."""
        return sum(map(self.nbytes, segments.sizes))

    def clear_segments_(self, wire: Tensor, segments: Segments, memory: Tensor) -> Tensor:
        """Set the entries of flat memory that this message contains to zero: all, unless sparse.

        Args:
            wire: the message, uint8 (m,).
            segments: the ranges that were encoded.
            memory: float32 (n,), returned. Only the ranges change.

        Raises:
            WireError: if no message of these segments has this many bytes.
        """
        self.check_size(wire, segments)
        return segments.zero_(memory)

    def encode_layout(self, x: Tensor, layout: Layout, turn: Turn) -> Tensor:
        """Encode these tensors of flat x with this rank's keys."""
        return self.encode_segments(x, layout.segments, turn.own_keys(layout.names))

    def encode_carried(self, x: Tensor, layout: Layout, turn: Turn) -> tuple[Tensor, Carried | None]:
        """Encode like `encode_layout`; also return the decoded entries, or None."""
        return self.encode_layout(x, layout, turn), None

    @final
    def encode(self, x: Tensor, key: int = 0) -> Tensor:
        """Encode one tensor. Equal keys give equal bytes.

        Args:
            x: float32 (n,), contiguous and finite, unchanged.
            key: an integer in 0..2^64 - 1, for random codecs.

        Returns:
            The wire, uint8 (m,) with m = `nbytes(n)` if `fixed_size`, else m <= `nbytes(n)`.

        Raises:
            ValueError: for an invalid x or key.
        """
        _check_vector("x", x, torch.float32)
        arguments.whole("key", key, 0, KEYS - 1)
        return self.encode_segments(x, Segments.whole(x.numel()), (key,))

    @final
    def decode(self, wire: Tensor, n: int) -> Tensor:
        """Decode one tensor to float32 (n,).

        Args:
            wire: a result of `encode`, uint8 (m,), contiguous, not trusted.
            n: the number of encoded elements.

        Raises:
            ValueError: if `wire` is not a vector of bytes, or n not a size.
            WireError: for bytes that no encoder can have produced.
        """
        _check_vector("wire", wire, torch.uint8)
        arguments.whole("n", n)
        if self.fixed_size:  # before n elements are allocated
            self.check_size(wire, Segments.whole(n))
        return self.decode_add_(wire, torch.zeros(n, dtype=torch.float32, device=wire.device))

    @final
    def decode_add_(self, wire: Tensor, out: Tensor, alpha: float = 1) -> Tensor:
        """Add alpha times one decoded tensor to `out` float32 (n,), in place, and return it.

        Raises `WireError` like `decode`, before any write.
        """
        return self.decode_segments_add_(wire, Segments.whole(out.numel()), out, alpha)

    @final
    def clear_(self, wire: Tensor, memory: Tensor) -> Tensor:
        """Set the entries of memory float32 (n,) that this wire contains to zero, and return it."""
        return self.clear_segments_(wire, Segments.whole(memory.numel()), memory)

    @final
    def check_size(self, wire: Tensor, segments: Segments) -> None:
        """Raise `WireError` unless a message of these segments can have this many bytes."""
        most, got = self.message_nbytes(segments), wire.numel()
        if got > most or (self.fixed_size and got < most):
            limit = most if self.fixed_size else f"at most {most}"
            raise WireError(f"{self!r}: a wire of {limit} bytes is expected, got {got}")


def _check_vector(name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Raise `ValueError` unless x is a contiguous vector of this dtype.

    >>> _check_vector("x", torch.zeros(2, 3), torch.int8)
    Traceback (most recent call last):
    ValueError: x must be a contiguous vector of torch.int8, got torch.float32; x.to(torch.int8) is one
    """
    if not isinstance(x, Tensor):
        got, hint = type(x).__name__, f"torch.tensor({name}, dtype={dtype})"
    elif x.dtype is not dtype:
        got, hint = f"{x.dtype}", f"{name}.to({dtype})"
    elif x.dim() != 1:
        got, hint = f"{dtype} of {tuple(x.shape)}", f"{name}.flatten()"
    elif not x.is_contiguous():
        got, hint = "a strided one", f"{name}.contiguous()"
    else:
        return
    raise ValueError(f"{name} must be a contiguous vector of {dtype}, got {got}; {hint} is one")
