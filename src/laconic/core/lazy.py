"""Lazy packages: `import laconic` is quick, and a public name is imported when it is first used.

A lazy package declares its names for type checkers and editors in `__all__` and under `TYPE_CHECKING`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from laconic.core import spec


class _OnDemand(ModuleType):
    """Package that finds a name in `__all__` when it is first used, and keeps it."""

    __all__: list[str]

    def __getattr__(self, name: str) -> Any:
        if name not in self.__all__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = self._find(name)
        setattr(self, name, found)
        return found

    def _find(self, name: str) -> Any:
        raise NotImplementedError

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


class LazyPackage(_OnDemand):
    """Package whose names in `homes` are imported from there; each other name in `__all__` is a submodule."""

    homes: dict[str, str]

    def _find(self, name: str) -> Any:
        if home := self.homes.get(name):
            return getattr(import_module(home), name)
        return import_module(f"{self.__name__}.{name}")


class NamePackage(_OnDemand):
    """Package whose names in `__all__` are the registered classes and functions: `laconic.codecs.qsgd`.

    A module of that name in the package, here `laconic/codecs/qsgd/`, is still imported by its path.
    """

    def _find(self, name: str) -> Any:
        return spec.find(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; when Python binds an imported submodule, set the submodule's maker instead."""
        if isinstance(value, ModuleType) and name in self.__all__:
            value = spec.own_maker(value, name)
        super().__setattr__(name, value)


def import_lazily(package: str, homes: dict[str, str]) -> None:
    """Make the package that calls this lazy; `homes` are the modules of its classes and functions."""
    module = sys.modules[package]
    module.__class__ = LazyPackage
    module.__dict__["homes"] = homes


def name_makers(package: str) -> None:
    """Make the package that calls this a `NamePackage`."""
    sys.modules[package].__class__ = NamePackage
