"""Errors that Laconic raises.

    LaconicError
    +-- SpecError       (ValueError)
    +-- WireError       (ValueError)
    +-- AttachError     (ValueError)
    +-- StateError      (ValueError)
    +-- DataError       (ValueError)
    +-- ExtraError      (ImportError)
    +-- NonFiniteError  (ArithmeticError)
    +-- PeerError       (RuntimeError)
    +-- LabError        (RuntimeError)

Each message names the value, the limit and the fix.
"""

from __future__ import annotations


class LaconicError(Exception):
    """Base class of all errors that Laconic raises on purpose."""


class SpecError(LaconicError, ValueError):
    """A spec string or one of its arguments is invalid."""


class WireError(LaconicError, ValueError):
    """Bytes that no encoder of this codec can have produced. `message`: number of the damaged message."""

    message: int | None = None


class AttachError(LaconicError, ValueError):
    """This model, optimiser or process group does not support the method."""


class StateError(LaconicError, ValueError):
    """A saved state is damaged, or its rank, world size, model or method does not match."""


class DataError(LaconicError, ValueError):
    """A data set is missing or unreadable."""


class ExtraError(LaconicError, ImportError):
    """An optional package that this command needs is not installed."""


class NonFiniteError(LaconicError, ArithmeticError):
    """A step whose gradients, or their means, hold NaN or Inf was about to be applied.

    No parameter has changed; under `compress` all memory is restored bit for bit.
    """


class PeerError(LaconicError, RuntimeError):
    """Another rank failed, died or disagrees."""


class LabError(LaconicError, RuntimeError):
    """This machine cannot emulate a network, or a command on an emulated host failed."""
