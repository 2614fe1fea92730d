"""The output of a ReLU between its call and the next, which tells whether a layer keeps it anyway."""

from __future__ import annotations

from torch import Tensor

from laconic.activations.kept import Coded, Kept, Order, Stale, Support, TwoValued
from laconic.activations.twins import Key


class Later:
    """What stands for the output of a ReLU: decided when the next tensor is saved."""

    def __init__(self, saved: Tensor, key: Key, label: str) -> None:
        self.key, self.label = key, label
        self._saved: Tensor | None = saved.detach()
        self._version = saved._version
        self._kept: Kept | None = None

    def settle(self, coded: Coded | None = None) -> int:
        """Keep nothing beside this coding of the same elements, or a bit an element. Returns its bytes."""
        if self._kept is None:
            saved = self._saved
            assert saved is not None
            if saved._version != self._version:
                self._kept = Stale(saved.shape)
            elif coded is not None:
                self._kept = Support(coded, Order.of(saved))
            else:
                self._kept = TwoValued.of(saved, saved.new_ones(()))
            self._saved = None
        return self._kept.nbytes

    @property
    def nbytes(self) -> int:
        """After it was settled."""
        return self._kept.nbytes if self._kept is not None else 0

    def unpack(self) -> Tensor:
        """Positive where the output was."""
        self.settle()
        assert self._kept is not None
        return self._kept.unpack()
