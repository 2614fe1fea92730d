"""Wire layout of error-bounded floats."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import NonFiniteError, SpecError

BLOCK = 256
HEAD = 5  # bytes: bound and kind of marks
ZERO, PLAIN, MARKED, TAGGED, RAW = range(5)  # kinds of blocks
TOP = 32767  # largest bin number; larger values are raw floats
LEAST, MOST = 2.0**-100, 2.0**100  # bounds whose bin centres are normal numbers
NARROW = 1.9921875  # bin width over bound: below 2 because of rounding


def bound32(eb: float) -> Tensor:
    """Return the wire's bound: the largest float32 () <= eb."""
    arguments.number("the error bound", eb, least=LEAST, most=MOST, hint="scale the tensor")
    bound = torch.tensor(eb, dtype=torch.float32, device="cpu")
    return (
        bound
        if float(bound) <= eb
        else torch.nextafter(bound, torch.tensor(-math.inf, dtype=torch.float32, device="cpu"))
    )


def step_of(bound: Tensor) -> tuple[Tensor, Tensor]:
    step = bound * NARROW
    return step, 1 / step


def error_bound_most(n: int) -> int:
    return HEAD + blocks(n) + 4 * n


def blocks(n: int) -> int:
    return -(-n // BLOCK)


def not_finite() -> NonFiniteError:
    return NonFiniteError(
        "no bound on the error holds for NaN or Inf, but the tensor has them: find the layer that makes"
        " them, or keep its input as it is"
    )


def check_marks(marks: str) -> int:
    if marks not in ("bins", "zeros"):
        raise SpecError(f"marks must be 'bins' or 'zeros', got {arguments.shown(marks)}")
    return int(marks == "bins")
