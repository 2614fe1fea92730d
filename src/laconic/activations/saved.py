"""Stored forms of a tensor saved for backward: several kinds, each with its own `unpack`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from laconic import kernels
from laconic.activations.coding import CodingRule
from laconic.activations.layer import Layer

FP16 = torch.finfo(torch.float16).max


class SavedTensor(Protocol):
    """Tensor saved for backward, in some stored form."""

    @property
    def nbytes(self) -> int: ...

    def unpack(self) -> Tensor: ...


@dataclass(frozen=True)
class MemoryOrder:
    """Shape, dtype and memory order of a dense tensor."""

    shape: torch.Size
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, x: Tensor) -> MemoryOrder:
        last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        return cls(x.shape, x.dtype, last)

    def flat(self, x: Tensor) -> Tensor:
        """Return the elements (n,), in memory order if x is dense."""
        return (x.permute(0, 2, 3, 1) if self.channels_last else x).reshape(-1)

    def shaped(self, x: Tensor) -> Tensor:
        """Invert `flat`. Clamps to the range of float16, as an error can push a value beyond it."""
        if self.dtype is torch.float16 and x.dtype is torch.float32:
            x = x.clamp(-FP16, FP16)
        if not self.channels_last:
            return x.view(self.shape).to(self.dtype)
        n, c, h, w = self.shape
        return x.view(n, h, w, c).permute(0, 3, 1, 2).to(self.dtype)


@dataclass(frozen=True)
class Exact:
    """The tensor: a leaf unchanged, a result detached, since its graph would form a reference cycle."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, saved: Tensor) -> Exact:
        return cls(saved if saved.is_leaf else saved.detach(), saved._version)

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    def unpack(self) -> Tensor:
        """Return the tensor; raise `RuntimeError` if it was modified in place (torch does not check here)."""
        if self.tensor._version != self.version:
            raise _modified_in_place("a tensor that backward needs", self.tensor.shape)
        return self.tensor


@dataclass(frozen=True)
class ModifiedRelu:
    """Output of a ReLU that was modified in place before it could be stored."""

    shape: torch.Size
    nbytes: int = 0

    def unpack(self) -> Tensor:
        """Raise `RuntimeError`, as torch does for a modified saved tensor."""
        raise _modified_in_place("the output of a ReLU", self.shape)


def _modified_in_place(what: str, shape: torch.Size) -> RuntimeError:
    return RuntimeError(
        f"{what}, {tuple(shape)}, was changed in place before backward: use an out-of-place operation after"
        " it"
    )


@dataclass(frozen=True)
class Encoded:
    """Encoded elements of a layer's input, shared by all views with the same elements in the same order."""

    wire: Tensor
    n: int
    coding: CodingRule
    bound: float

    @classmethod
    def of(cls, x: Tensor, coding: CodingRule, bound: float, signs: bool, key: int) -> Encoded:
        half = 1.0 if x.dtype is torch.float32 else 0.5  # rounding to 16 bits adds at most the same error
        flat = MemoryOrder.of(x).flat(x.detach().resolve_neg()).float().contiguous()
        return cls(coding.encode(flat, half * bound, signs, key), x.numel(), coding, bound)

    @property
    def nbytes(self) -> int:
        return self.wire.numel()


@dataclass(frozen=True)
class EncodedInput:
    """Input of a layer: encoded elements and their shape."""

    coded: Encoded
    order: MemoryOrder
    layer: Layer

    @property
    def nbytes(self) -> int:
        return self.coded.nbytes

    def unpack(self) -> Tensor:
        self.layer.mark_backward()
        return self.order.shaped(self.coded.coding.decode(self.coded.wire, self.coded.n))


@dataclass(frozen=True)
class MaskFromInput:
    """Mask of a ReLU, read from its output as encoded for the next layer."""

    coded: Encoded
    order: MemoryOrder
    nbytes: int = 0

    def unpack(self) -> Tensor:
        """Return 1 where the output was nonzero, else 0."""
        return self.order.shaped(self.coded.coding.nonzero(self.coded.wire, self.coded.n))


@dataclass(frozen=True)
class BitMask:
    """Mask of a ReLU or dropout, 0 or one other value: one bit per element."""

    bits: Tensor
    value: Tensor
    order: MemoryOrder

    @classmethod
    def of(cls, x: Tensor, value: Tensor) -> BitMask:
        order = MemoryOrder.of(x)
        return cls(kernels.pack_bits((~(order.flat(x) <= 0)).to(torch.int32), 1), value, order)

    @property
    def nbytes(self) -> int:
        return self.bits.numel() + self.value.numel() * self.value.element_size()

    def unpack(self) -> Tensor:
        bits = kernels.unpack_bits(self.bits, 1, self.order.shape.numel())
        return self.order.shaped(bits) * self.value


@dataclass(frozen=True)
class ShapeOnly:
    """Tensor whose values backward does not read, such as the input of max pooling."""

    like: Tensor  # (), with the same dtype and device
    order: MemoryOrder
    nbytes: int = 0

    @classmethod
    def of(cls, x: Tensor) -> ShapeOnly:
        return cls(x.new_zeros(()), MemoryOrder.of(x))

    def unpack(self) -> Tensor:
        return self.order.shaped(self.like.new_zeros(self.order.shape.numel()))
