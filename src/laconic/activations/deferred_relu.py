"""Output of a ReLU until the next saved tensor shows whether a layer encodes it as its input."""

from __future__ import annotations

from torch import Tensor

from laconic.activations.saved import BitMask, Encoded, MaskFromInput, MemoryOrder, ModifiedRelu, SavedTensor
from laconic.activations.shared_encodings import Key


class DeferredRelu:
    """Saved output of a ReLU whose stored form is chosen when the next tensor is saved."""

    def __init__(self, saved: Tensor, key: Key, label: str) -> None:
        self.key, self.label = key, label
        self._saved: Tensor | None = saved.detach()
        self._version = saved._version
        self._stored: SavedTensor | None = None

    def resolve(self, coded: Encoded | None = None) -> int:
        """Store nothing if `coded` has the same elements, else one bit each. Return the bytes stored."""
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
        """Bytes stored; 0 before `resolve`."""
        return self._stored.nbytes if self._stored is not None else 0

    def unpack(self) -> Tensor:
        """Return a tensor that is positive where the output was positive."""
        self.resolve()
        assert self._stored is not None
        return self._stored.unpack()
