"""One treatment at a time: weights that have few bits, are drawn to a table or are masked take no other.

A second one would undo the first: signs have no zeros for a mask to keep, and a mask no place in a table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from weakref import WeakSet

from torch import nn

from laconic.core.errors import AttachError
from laconic.core.mask import mask_of
from laconic.lowbit.few_bit_layers import FEW
from laconic.lowbit.kept import is_kept

_drawn: WeakSet[nn.Module] = WeakSet()  # layers that some training draws to a table now


def draw(layers: Iterable[nn.Module]) -> None:
    """These layers are drawn to a table from now on."""
    _drawn.update(layers)


def leave(layers: Iterable[nn.Module]) -> None:
    """These layers are not drawn to a table any more."""
    _drawn.difference_update([*layers])


def refuse_taken(names: Mapping[str, nn.Module], keep: Collection[str] = ()) -> None:
    """Raise `AttachError` if one of these modules, but for those that are kept, has been treated already."""
    for name, module in names.items():
        if is_kept(name, keep):
            continue
        if isinstance(module, FEW):
            state = "has few bits already"
        elif module in _drawn:
            state = "is drawn to a table already"
        elif any(each is not None and mask_of(each) is not None for each in module._parameters.values()):
            state = "is masked already"
        else:
            continue
        raise AttachError(f"{name!r} {state}: call the first handle's remove() before another")
