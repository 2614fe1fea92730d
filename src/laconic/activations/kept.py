"""What is kept of a saved tensor until backward asks for it: several kinds, each with its way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from laconic import kernels
from laconic.activations.coding import Coding
from laconic.activations.layer import Layer

FP16 = torch.finfo(torch.float16).max


class Kept(Protocol):
    """Bytes that wait for backward."""

    @property
    def nbytes(self) -> int: ...

    def unpack(self) -> Tensor: ...


@dataclass(frozen=True)
class Order:
    """Shape, dtype and order in memory of a dense tensor, which comes back as it was."""

    shape: torch.Size
    dtype: torch.dtype
    last: bool  # channels last

    @classmethod
    def of(cls, x: Tensor) -> Order:
        last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        return cls(x.shape, x.dtype, last)

    def flat(self, x: Tensor) -> Tensor:
        """(n,), as the elements lie in memory where that is dense."""
        return (x.permute(0, 2, 3, 1) if self.last else x).reshape(-1)

    def shaped(self, x: Tensor) -> Tensor:
        """And back; what float16 would have as Inf, as an error can make it, as its largest."""
        if self.dtype is torch.float16 and x.dtype is torch.float32:
            x = x.clamp(-FP16, FP16)
        if not self.last:
            return x.view(self.shape).to(self.dtype)
        n, c, h, w = self.shape
        return x.view(n, h, w, c).permute(0, 3, 1, 2).to(self.dtype)


@dataclass(frozen=True)
class Exact:
    """The tensor itself: a parameter as it is, a result as an alias without its history.

    An operation's own output, kept with its history, would hold the operation that holds it: for ever.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, saved: Tensor) -> Exact:
        return cls(saved if saved.is_leaf else saved.detach(), saved._version)

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    def unpack(self) -> Tensor:
        """Raises `RuntimeError` where it was changed since: torch checks only what no hook has packed."""
        if self.tensor._version != self.version:
            raise _changed("a tensor that backward needs", self.tensor.shape)
        return self.tensor


@dataclass(frozen=True)
class Stale:
    """The output of a ReLU that was changed in place before it could be kept."""

    shape: torch.Size
    nbytes: int = 0

    def unpack(self) -> Tensor:
        """Raises `RuntimeError`, as torch does for a saved tensor that was changed."""
        raise _changed("the output of a ReLU", self.shape)


def _changed(what: str, shape: torch.Size) -> RuntimeError:
    return RuntimeError(
        f"{what}, {tuple(shape)}, was changed in place before backward: use an operation that is not in"
        " place after it"
    )


@dataclass(frozen=True)
class Coded:
    """The elements of a layer's input, coded within its bound: one for all views that have them in order."""

    wire: Tensor
    n: int
    coding: Coding
    bound: float

    @classmethod
    def of(cls, x: Tensor, coding: Coding, bound: float, signs: bool, key: int) -> Coded:
        half = 1.0 if x.dtype is torch.float32 else 0.5  # rounding back to 16 bits adds at most as much again
        flat = Order.of(x).flat(x.detach().resolve_neg()).float().contiguous()
        return cls(coding.encode(flat, half * bound, signs, key), x.numel(), coding, bound)

    @property
    def nbytes(self) -> int:
        return self.wire.numel()


@dataclass(frozen=True)
class Input:
    """An input of a layer: coded elements in its own shape."""

    coded: Coded
    order: Order
    layer: Layer

    @property
    def nbytes(self) -> int:
        return self.coded.nbytes

    def unpack(self) -> Tensor:
        self.layer.goes_back()
        return self.order.shaped(self.coded.coding.decode(self.coded.wire, self.coded.n))


@dataclass(frozen=True)
class Support:
    """The mask of a ReLU out of its coded output, which a layer keeps anyway."""

    coded: Coded
    order: Order

    @property
    def nbytes(self) -> int:
        return 0

    def unpack(self) -> Tensor:
        """1 where the output was not 0, else 0."""
        return self.order.shaped(kernels.error_bound_support(self.coded.wire, self.coded.n))


@dataclass(frozen=True)
class TwoValued:
    """0 or one other value: the mask of a ReLU or of dropout, a bit an element."""

    bits: Tensor
    value: Tensor
    order: Order

    @classmethod
    def of(cls, x: Tensor, value: Tensor) -> TwoValued:
        order = Order.of(x)
        return cls(kernels.pack_bits((~(order.flat(x) <= 0)).to(torch.int32), 1), value, order)

    @property
    def nbytes(self) -> int:
        return self.bits.numel() + self.value.numel() * self.value.element_size()

    def unpack(self) -> Tensor:
        bits = kernels.unpack_bits(self.bits, 1, self.order.shape.numel())
        return self.order.shaped(bits) * self.value


@dataclass(frozen=True)
class Shape:
    """A tensor whose values backward does not read, such as the input of max pooling."""

    like: Tensor  # (), of its dtype and device
    order: Order

    @classmethod
    def of(cls, x: Tensor) -> Shape:
        return cls(x.new_zeros(()), Order.of(x))

    @property
    def nbytes(self) -> int:
        return 0

    def unpack(self) -> Tensor:
        return self.order.shaped(self.like.new_zeros(self.order.shape.numel()))
