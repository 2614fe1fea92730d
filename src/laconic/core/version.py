"""The installed version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("laconic")
except PackageNotFoundError:  # run from the sources
    VERSION = "0+unknown"
