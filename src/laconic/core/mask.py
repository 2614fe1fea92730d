"""Masks of the parameter entries in use, equal on all ranks; all others are zero and get no gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from laconic.core.memory_order import by_stride


@dataclass(frozen=True, eq=False)
class Mask:
    """Entries of one parameter that are in use. A changed mask is a new object.

    Attributes:
        used: bool, in the parameter's shape.
        positions: int64 (k,), ascending, in the parameter's memory order.
        stride: The parameter's strides, for which the positions hold.

    >>> import torch
    >>> Mask.of(torch.zeros(2, 2), torch.tensor([[True, False], [False, True]])).positions
    tensor([0, 3])
    """

    used: Tensor
    positions: Tensor
    stride: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Tensor, used: Tensor) -> Mask:
        used = used.to(parameter.device)
        positions = used.permute(by_stride(parameter)).flatten().nonzero().flatten()
        return cls(used, positions, parameter.stride())

    def clear_(self, x: Tensor) -> Tensor:
        return x.masked_fill_(~self.used, 0)


_masks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def mask_of(parameter: Tensor) -> Mask | None:
    """Return the parameter's mask, for its present memory format and device, or None."""
    found: Mask | None = _masks.get(parameter)  # type: ignore[no-untyped-call]
    if found is not None and (found.stride, found.used.device) != (parameter.stride(), parameter.device):
        found = Mask.of(parameter, found.used)
        set_mask(parameter, found)
    return found


def set_mask(parameter: Tensor, mask: Mask | None) -> None:
    if mask is None:
        _masks.pop(parameter, None)  # type: ignore[no-untyped-call]
    else:
        _masks[parameter] = mask


def cleared(state: Mapping[str, Tensor], masks: Mapping[str, Mask]) -> dict[str, Tensor] | None:
    """Return a state with zeros for unused entries; None if that changes nothing.

    Args:
        state: "<kind>/<tensor name>" to a tensor, in a bucket's order if it has a masked tensor's size.
        masks: By tensor name.

    >>> import torch
    >>> mask = Mask.of(torch.zeros(2), torch.tensor([True, False]))
    >>> cleared({"residual/w": torch.tensor([1.0, 2.0])}, {"w": mask})
    {'residual/w': tensor([1., 0.])}
    """
    made, any_changed = dict(state), False
    for key, value in state.items():
        mask = masks.get(key.rpartition("/")[2])
        if mask is None or value.numel() != mask.used.numel():
            continue
        flat, kept = value.flatten(), value.new_zeros(value.numel())
        positions = mask.positions.to(value.device)
        kept[positions] = flat[positions]
        if bool((kept != flat).any()):
            made[key], any_changed = kept.view(value.shape), True
    return made if any_changed else None


class MaskWatch:
    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._masks: dict[str, Mask] = {}

    @property
    def present(self) -> Mapping[str, Mask]:
        return self._masks

    def changed(self) -> Mapping[str, Mask] | None:
        held = self._parameters if len(_masks) else {}
        found = {name: mask for name, each in held.items() if (mask := mask_of(each)) is not None}
        same = found.keys() == self._masks.keys() and all(found[name] is self._masks[name] for name in found)
        self._masks = found
        return None if same else found
