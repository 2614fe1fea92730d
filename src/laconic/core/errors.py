"""The errors that Laconic raises.

    LaconicError
    +-- SpecError       (ValueError)       a spec string or an argument of one is wrong
    +-- WireError       (ValueError)       bytes that no encoder of this codec can have made
    +-- AttachError     (ValueError)       this model, optimiser or group cannot take this method
    +-- StateError      (ValueError)       a saved state that belongs elsewhere, or is damaged
    +-- DataError       (ValueError)       a data set that is missing or unreadable
    +-- ExtraError      (ImportError)      an optional package that this command needs is not installed
    +-- NonFiniteError  (ArithmeticError)  a step whose gradients hold NaN or Inf was about to be applied
    +-- PeerError       (RuntimeError)     another rank failed, died or disagrees
    +-- LabError        (RuntimeError)     this machine cannot emulate a network, or an emulated host failed

Each message names the value, the limit and the way out.
"""

from __future__ import annotations


class LaconicError(Exception):
    """Any error that Laconic raises on purpose."""


class SpecError(LaconicError, ValueError):
    """A spec string, or an argument of one, is wrong."""


class WireError(LaconicError, ValueError):
    """Bytes that no encoder of this codec can have made.

    `message`: number of the damaged message among those decoded in one call; None if there was one message.
    """

    message: int | None = None


class AttachError(LaconicError, ValueError):
    """This model, optimiser or process group cannot take this method."""


class StateError(LaconicError, ValueError):
    """A saved state that does not belong here: other rank, world size, model or method, or damaged."""


class DataError(LaconicError, ValueError):
    """A data set that is missing or unreadable."""


class ExtraError(LaconicError, ImportError):
    """An optional package that this command needs is not installed."""


class NonFiniteError(LaconicError, ArithmeticError):
    """A step whose gradients, or their means, hold NaN or Inf was about to be applied.

    No parameter was changed, and under `compress` every memory is to the last bit as before the step.
    """


class PeerError(LaconicError, RuntimeError):
    """Another rank failed, died or disagrees."""


class LabError(LaconicError, RuntimeError):
    """This machine cannot emulate a network, or what ran on an emulated host failed."""
