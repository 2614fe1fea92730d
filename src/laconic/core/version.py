"""The version of this package, as it is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("laconic")
except PackageNotFoundError:  # run from its sources, without being installed
    VERSION = "0+unknown"
