"""Check that layers are transformed once: a second transform would undo the first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import ClassVar
from weakref import WeakSet

from torch import nn

from laconic.core.errors import AttachError
from laconic.core.mask import mask_of
from laconic.transforms.keep import is_kept

_table_layers: WeakSet[nn.Module] = WeakSet()


class TransformedLayer(nn.Module):
    """Base of a transform's layers. `refusal`: for errors, such as "has few bits"."""

    refusal: ClassVar[str]


def mark_table_layers(layers: Iterable[nn.Module]) -> None:
    _table_layers.update(layers)


def unmark_table_layers(layers: Iterable[nn.Module]) -> None:
    _table_layers.difference_update([*layers])


def refuse_transformed(modules: Mapping[str, nn.Module], keep: Collection[str] = ()) -> None:
    for name, module in modules.items():
        if is_kept(name, keep):
            continue
        if isinstance(module, TransformedLayer):
            refusal = module.refusal
        elif module in _table_layers:
            refusal = "is quantised to a table already"
        elif any(each is not None and mask_of(each) is not None for each in module._parameters.values()):
            refusal = "is masked already"
        else:
            continue
        raise AttachError(f"{name!r} {refusal}: call the first handle's remove() before another")
