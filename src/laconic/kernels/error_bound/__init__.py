"""Block-wise floats within an absolute error bound; zeros stay zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.kernels import checks, dispatch
from laconic.kernels.error_bound import reference
from laconic.kernels.error_bound.form import BLOCK, blocks, bound32, check_marks, not_finite, step_of
from laconic.kernels.error_bound.form import LEAST as LEAST
from laconic.kernels.error_bound.form import MOST as MOST
from laconic.kernels.error_bound.form import error_bound_most as error_bound_most

SCRATCH = 3 * 1024 + 64  # bytes per block before sections are joined


def error_bound_encode(x: Tensor, eb: float, marks: str = "bins") -> Tensor:
    """Encode x float32 (n,), contiguous, to uint8 (m,): every element within eb, zeros exact.

    Args:
        eb: Error bound, from 2^-100 to 2^100.
        marks: "bins" is shorter; "zeros" also stores where x == 0, for `error_bound_support`.

    Returns at most `error_bound_most(n)` bytes. Raises `NonFiniteError` for NaN and Inf, `SpecError` for a
    bound out of range.

    >>> x = torch.tensor([0.0, 0.04, -1.0, 3.0])
    >>> error_bound_decode(error_bound_encode(x, eb=0.05), 4)
    tensor([ 0.0000,  0.0000, -0.9961,  2.9883])
    """
    bound, floor = bound32(eb), check_marks(marks)
    checks.flat("x", x)
    if (native := dispatch.native(x)) is None:
        return reference.encode(x, bound.to(x.device), floor)
    step, inverse = step_of(bound)
    wire = torch.empty(64 + blocks(x.numel()) * (SCRATCH + 41 + 4 * BLOCK), dtype=torch.uint8, device="cpu")
    used = native.error_bound_encode(x, float(bound), float(step), float(inverse), floor, wire)
    if used < 0:
        raise not_finite()
    return wire[:used].clone()


def error_bound_decode(wire: Tensor, n: int) -> Tensor:
    """Decode to float32 (n,). Raises `WireError` for bytes that no encoder makes."""
    _check(wire, n)
    if (native := dispatch.native(wire)) is None:
        return reference.decode(wire, n)[0]
    reference.check_size(wire, n)
    out = torch.empty(n, dtype=torch.float32, device="cpu")
    native.error_bound_decode(wire, out)
    return out


def error_bound_support(wire: Tensor, n: int) -> Tensor:
    """Return bool (n,): nonzero elements of a wire with marks="zeros". Raises `WireError` for others."""
    _check(wire, n)
    reference.check_support(wire, n)
    if (native := dispatch.native(wire)) is None:
        return reference.decode(wire, n)[1]
    out = torch.empty(n, dtype=torch.uint8, device="cpu")
    native.error_bound_support(wire, out)
    return out.view(torch.bool)


def _check(wire: Tensor, n: int) -> None:
    checks.flat("wire", wire, torch.uint8)
    arguments.whole("n", n)
