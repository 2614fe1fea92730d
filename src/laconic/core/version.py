"""Installed version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("laconic")
except PackageNotFoundError:  # run from the sources
    __version__ = "0+unknown"
