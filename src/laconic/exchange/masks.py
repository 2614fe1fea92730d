"""Masks of a model's tensors, as its exchange sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from laconic.core.mask import Mask


class MaskWatch:
    """Notices that masks have changed. `mask_of`: the present mask of a tensor's name, None without one."""

    def __init__(self, names: Sequence[str], mask_of: Callable[[str], Mask | None]) -> None:
        self._names, self._mask_of = names, mask_of
        self.masks: dict[str, Mask] = {}

    def changed(self) -> Mapping[str, Mask] | None:
        """All masks, if any of them is another one than at the last call; else None."""
        found = {name: mask for name in self._names if (mask := self._mask_of(name)) is not None}
        same = found.keys() == self.masks.keys() and all(found[name] is self.masks[name] for name in found)
        self.masks = found
        return None if same else found
