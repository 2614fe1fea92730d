"""Channel: one side of a tensor that crosses a boundary in one direction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.framing import as_bytes, as_numbers
from laconic.core.turn import mix, name_key


@dataclass(frozen=True)
class Visit:
    """Transfer of a micro-batch.

    `ids`: int64 (rows,) or None. `may_fail`: whether other ranks can still void its step.
    """

    step: int
    micro: int
    ids: Tensor | None
    training: bool = True
    may_fail: bool = False


class Channel(ABC):
    """Encoder on the sender's side, decoder on the receiver's. `name`: boundary and tensor: "0>1:0"."""

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, seed: int) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self._seed = mix(seed, name_key(name))

    @property
    @abstractmethod
    def most(self) -> int:
        """Largest size of a body, in bytes."""

    def room(self, visit: Visit) -> int:
        """Return the largest size of this visit's body, known to both sides."""
        return self.most

    @abstractmethod
    def encode(self, x: Tensor, visit: Visit) -> Tensor:
        """Encode x to a body uint8 (m,). Raises `NonFiniteError`, with no memory changed, for NaN and Inf."""

    @abstractmethod
    def decode_(self, body: Tensor, out: Tensor, visit: Visit) -> None:
        """Decode a body to `out`. Raises `WireError` for an invalid body."""

    def agreed(self, visit: Visit) -> tuple[bytes | str, ...]:
        return self.name, repr((tuple(self.shape), self.dtype, visit.step, visit.micro, visit.training))

    def key(self, visit: Visit, sample: int = 0) -> int:
        return mix(self._seed, visit.step, visit.micro, sample)


class Plain(Channel):
    @property
    def most(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def encode(self, x: Tensor, visit: Visit) -> Tensor:
        check_finite(x)
        return as_bytes(x.contiguous().view(-1))

    def decode_(self, body: Tensor, out: Tensor, visit: Visit) -> None:
        if body.numel() != self.most:
            raise WireError(f"expected a body of {self.most} bytes, got {body.numel()}")
        out.copy_(as_numbers(body, self.dtype).view(self.shape))


class Coded(Channel):
    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, seed: int, codec: Codec) -> None:
        super().__init__(name, shape, dtype, seed)
        self.codec = codec

    @property
    def most(self) -> int:
        return self.codec.nbytes(self.shape.numel())

    def encode(self, x: Tensor, visit: Visit) -> Tensor:
        check_finite(x)
        return self.codec.encode(as_vector(x), self.key(visit))

    def decode_(self, body: Tensor, out: Tensor, visit: Visit) -> None:
        out.copy_(self.codec.decode(body, self.shape.numel()).view(self.shape))


def check_finite(x: Tensor) -> None:
    """Raise `NonFiniteError` for NaN and Inf, which some codecs accept."""
    if not bool(x.isfinite().all()):
        raise NonFiniteError("the tensor holds NaN or Inf")


def as_vector(x: Tensor) -> Tensor:
    return x.to(torch.float32).contiguous().view(-1)
