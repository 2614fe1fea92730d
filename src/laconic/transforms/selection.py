"""Selection and replacement of the layers that a transform changes.

    layers = Layers.of(named_modules(model), KINDS, keep)      refuses a wrong `keep=` and transformed layers
    layers.refuse_shared(selected, ...)                        refuses layers that cannot be changed
    replace_layers(model, made)

Every refusal is an `AttachError`, before any change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from laconic.core.errors import AttachError
from laconic.transforms.computed import plain_type, refuse_parametrised
from laconic.transforms.fast_path import refuse_uncalled
from laconic.transforms.keep import check_keep, is_kept
from laconic.transforms.transformed import refuse_transformed


@dataclass(frozen=True)
class Layers:
    """Layers of some kinds in a model.

    Attributes:
        modules: All modules by name; a shared one under each name.
        found: The layers of these kinds, also inside `keep`.
        keep: Names of modules that do not change.
    """

    modules: dict[str, nn.Module]
    found: dict[str, Any]
    keep: Collection[str]

    @classmethod
    def of(
        cls,
        modules: dict[str, nn.Module],
        kinds: Collection[type],
        keep: Collection[str],
        *,
        replaced: bool = False,
    ) -> Layers:
        """Find the layers of these kinds. `replaced`: whether others take their places."""
        check_keep(modules, keep)
        refuse_transformed(modules, keep)
        found = {name: module for name, module in modules.items() if plain_type(module) in kinds}
        if replaced and "" in found:
            raise AttachError(
                "the model is a single layer, which cannot be replaced in place: wrap it in nn.Sequential"
            )
        return cls(modules, found, keep)

    def outside_keep(self, names: Collection[str]) -> dict[str, Any]:
        return {name: self.found[name] for name in names if not is_kept(name, self.keep)}

    def refuse_parametrised(self, names: Collection[str]) -> None:
        for name, layer in self.outside_keep(names).items():
            refuse_parametrised(name, layer)

    def refuse_shared(
        self, selected: Collection[str], reason: str, keys: Collection[str] | None = None
    ) -> None:
        """Refuse selected layers whose parameters (only `keys`) are used twice in the model."""
        owners: dict[int, tuple[str, str]] = {}
        for name, module in self.modules.items():
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                owner, first = owners.setdefault(id(parameter), (name, key))
                matters = (name in selected and (keys is None or key in keys)) or owner in selected
                if (owner, first) != (name, key) and matters:
                    raise AttachError(
                        f"{owner!r} and {name!r} share their {key}: {f'{owner}.{first}'!r} and"
                        f" {f'{name}.{key}'!r} are one tensor, and {reason}: untie them, or keep both as they"
                        f" are with keep=({owner!r}, {name!r})"
                    )

    def refuse_unreplaceable(self, selected: Collection[str], form: str) -> None:
        """Refuse selected layers with hooks, or that the model reads instead of calling."""
        refuse_uncalled(self.modules, selected)
        for name in selected:
            refuse_hooks(name, self.modules[name], form)


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules(remove_duplicate=False))


def refuse_hooks(name: str, layer: nn.Module, form: str, then: str = "afterwards") -> None:
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
        raise AttachError(f"{name!r} has hooks, which its {form} would lose: add them {then}")


def replace_layers(model: nn.Module, layers: Mapping[str, Any]) -> None:
    for name, layer in layers.items():
        parent, _, key = name.rpartition(".")
        layer.train(model.get_submodule(name).training)
        setattr(model.get_submodule(parent), key, layer)
