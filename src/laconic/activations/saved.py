"""Stored forms of a tensor saved for backward, each with its own `unpack`.

Tensors with the same elements share one encoding. A ReLU's form depends on the next saved tensor.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic import kernels
from laconic.activations.coding import CodingRule
from laconic.activations.layer import Layer
from laconic.activations.ledger import StorageRef

FP16 = torch.finfo(torch.float16).max
MAX_ENTRIES = 256  # before expired ones are dropped
Key = tuple[int, int, int, int, torch.dtype, bool, tuple[int, ...]]


class SavedTensor(Protocol):
    @property
    def nbytes(self) -> int: ...

    def unpack(self) -> Tensor: ...


@dataclass(frozen=True)
class MemoryOrder:
    shape: torch.Size
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, x: Tensor) -> MemoryOrder:
        last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        return cls(x.shape, x.dtype, last)

    def flat(self, x: Tensor) -> Tensor:
        return (x.permute(0, 2, 3, 1) if self.channels_last else x).reshape(-1)

    def shaped(self, x: Tensor) -> Tensor:
        """Invert `flat`; clamp to float16, as an error can exceed its range."""
        if self.dtype is torch.float16 and x.dtype is torch.float32:
            x = x.clamp(-FP16, FP16)
        if not self.channels_last:
            return x.view(self.shape).to(self.dtype)
        n, c, h, w = self.shape
        return x.view(n, h, w, c).permute(0, 3, 1, 2).to(self.dtype)


@dataclass(frozen=True)
class Exact:
    """The tensor: a leaf unchanged, a result detached, as its graph would form a reference cycle."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, saved: Tensor) -> Exact:
        return cls(saved if saved.is_leaf else saved.detach(), saved._version)

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    def unpack(self) -> Tensor:
        """Return the tensor; raise `RuntimeError` if modified in place, which torch does not check here."""
        if self.tensor._version != self.version:
            raise _modified_in_place("a tensor that backward needs", self.tensor.shape)
        return self.tensor


@dataclass(frozen=True)
class ModifiedRelu:
    """Output of a ReLU, modified in place before it was stored."""

    shape: torch.Size
    nbytes: int = 0

    def unpack(self) -> Tensor:
        raise _modified_in_place("the output of a ReLU", self.shape)


def _modified_in_place(what: str, shape: torch.Size) -> RuntimeError:
    advice = "use an out-of-place operation after it"
    return RuntimeError(f"{what}, {tuple(shape)}, was changed in place before backward: {advice}")


@dataclass(frozen=True)
class Encoded:
    """Elements shared by all views with the same order."""

    wire: Tensor
    n: int
    coding: CodingRule
    bound: float

    @classmethod
    def of(cls, x: Tensor, coding: CodingRule, bound: float, signs: bool, key: int) -> Encoded:
        half = 1.0 if x.dtype is torch.float32 else 0.5  # for rounding to 16 bits
        flat = MemoryOrder.of(x).flat(x.detach().resolve_neg()).float().contiguous()
        return cls(coding.encode(flat, half * bound, signs, key), x.numel(), coding, bound)

    @property
    def nbytes(self) -> int:
        return self.wire.numel()


@dataclass(frozen=True)
class EncodedInput:
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
    """Mask of a ReLU, read from its encoded output."""

    coded: Encoded
    order: MemoryOrder
    nbytes: int = 0

    def unpack(self) -> Tensor:
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
    """Tensor whose values backward does not read."""

    like: Tensor  # (), with the same dtype and device
    order: MemoryOrder
    nbytes: int = 0

    @classmethod
    def of(cls, x: Tensor) -> ShapeOnly:
        return cls(x.new_zeros(()), MemoryOrder.of(x))

    def unpack(self) -> Tensor:
        return self.order.shaped(self.like.new_zeros(self.order.shape.numel()))


class DeferredRelu:
    """Output of a ReLU, stored when the next tensor is saved."""

    def __init__(self, saved: Tensor, key: Key, label: str) -> None:
        self.key, self.label = key, label
        self._saved: Tensor | None = saved.detach()
        self._version = saved._version
        self._stored: SavedTensor | None = None

    def resolve(self, coded: Encoded | None = None) -> int:
        """Store nothing if `coded` has the same elements, else one bit each."""
        if self._stored is None:
            saved = self._saved
            assert saved is not None
            if saved._version != self._version:
                self._stored = ModifiedRelu(saved.shape)
            elif coded is not None:
                self._stored = MaskFromInput(coded, MemoryOrder.of(saved))
            else:
                self._stored = BitMask.of(saved, saved.new_ones(()))
            self._saved = None
        return self._stored.nbytes

    @property
    def nbytes(self) -> int:
        return self._stored.nbytes if self._stored is not None else 0

    def unpack(self) -> Tensor:
        """Return a tensor that is positive where the output was."""
        self.resolve()
        assert self._stored is not None
        return self._stored.unpack()


def elements(saved: Tensor) -> Key:
    """Return a key that is equal for tensors with the same elements under `MemoryOrder.flat`.

    Dense tensors have the key of their place in the storage, others also shape and strides.
    """
    dense = saved.is_contiguous() or MemoryOrder.of(saved).channels_last
    form = () if dense else (*saved.shape, *saved.stride())
    place = int(saved.untyped_storage()._cdata), int(saved._version), int(saved.storage_offset())
    return *place, saved.numel(), saved.dtype, saved.is_neg(), form


class SharedEncodings:
    """Weak references to encodings: a graph keeps them alive."""

    def __init__(self) -> None:
        self._coded: dict[Key, tuple[Any, weakref.ref[Encoded]]] = {}

    def find(self, key: Key) -> Encoded | None:
        found = self._coded.get(key)
        return found[1]() if found is not None and not found[0].expired() else None

    def add(self, key: Key, saved: Tensor, coded: Encoded) -> None:
        if len(self._coded) >= MAX_ENTRIES:
            self._coded = {k: v for k, v in self._coded.items() if not v[0].expired()}
        self._coded[key] = StorageRef(saved.untyped_storage()), weakref.ref(coded)
