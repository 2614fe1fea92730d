"""Channel: one tensor that crosses one boundary in one direction, seen from one side."""

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
    """One micro-batch on its way.

    Attributes:
        ids: int64 (rows,) of its samples, or None where nobody gave any.
        may_fail: whether it is of a step that others may void: what it changes waits for that step's end.
    """

    step: int
    micro: int
    ids: Tensor | None
    training: bool = True
    may_fail: bool = False


class Channel(ABC):
    """Encodes on the sender's side, decodes on the receiver's; a memory, if any, changes with either.

    Attributes:
        name: of the boundary and its tensor, such as "0>1:0"; equal on both sides.
        shape, dtype: of the tensor.
    """

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, seed: int) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self._seed = mix(seed, name_key(name))

    @property
    @abstractmethod
    def most(self) -> int:
        """The most bytes of any body."""

    def room(self, visit: Visit) -> int:
        """The most bytes of this visit's body, from what both sides know."""
        return self.most

    @abstractmethod
    def encode(self, x: Tensor, visit: Visit) -> Tensor:
        """A body uint8 (m,) of x. Raises `NonFiniteError` for NaN and Inf, with no memory changed."""

    @abstractmethod
    def decode_(self, body: Tensor, out: Tensor, visit: Visit) -> None:
        """Write what a body stands for to `out`. Raises `WireError` for one that no encoder can have made."""

    def agreed(self, visit: Visit) -> tuple[bytes | str, ...]:
        """What both sides must have alike to understand a body."""
        return self.name, repr((tuple(self.shape), self.dtype, visit.step, visit.micro, visit.training))

    def key(self, visit: Visit, sample: int = 0) -> int:
        """For random codecs: from seed, boundary, step, micro-batch and sample."""
        return mix(self._seed, visit.step, visit.micro, sample)


class Plain(Channel):
    """The tensor's own bytes, in its own dtype: nothing is lost."""

    @property
    def most(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def encode(self, x: Tensor, visit: Visit) -> Tensor:
        check_finite(x)
        return as_bytes(x.contiguous().view(-1))

    def decode_(self, body: Tensor, out: Tensor, visit: Visit) -> None:
        if body.numel() != self.most:
            raise WireError(f"a body of {self.most} bytes is expected, got {body.numel()}")
        out.copy_(as_numbers(body, self.dtype).view(self.shape))


class Coded(Channel):
    """The whole tensor by one codec, without memory."""

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
    """Raise `NonFiniteError` for NaN and Inf: not every codec does."""
    if not bool(x.isfinite().all()):
        raise NonFiniteError("it holds NaN or Inf")


def as_vector(x: Tensor) -> Tensor:
    """x as a contiguous float32 (n,)."""
    return x.to(torch.float32).contiguous().view(-1)
