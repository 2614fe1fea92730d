"""Lazy packages: a public name, declared in `__all__`, is imported at its first use."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from laconic.core import spec


class _OnDemand(ModuleType):
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
    homes: dict[str, str]

    def _find(self, name: str) -> Any:
        if home := self.homes.get(name):
            return getattr(import_module(home), name)
        return import_module(f"{self.__name__}.{name}")


class NamePackage(_OnDemand):
    """Package whose names in `__all__` are registered classes and functions: `laconic.codecs.qsgd`."""

    def _find(self, name: str) -> Any:
        return spec.find(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Bind the class or function of that name where Python binds its submodule."""
        if isinstance(value, ModuleType) and name in self.__all__:
            value = spec.own_maker(value, name)
        super().__setattr__(name, value)


def import_lazily(package: str, homes: dict[str, str]) -> None:
    """Make the package lazy; `homes`: modules by name."""
    module = sys.modules[package]
    module.__class__ = LazyPackage
    module.__dict__["homes"] = homes


def name_makers(package: str) -> None:
    sys.modules[package].__class__ = NamePackage
