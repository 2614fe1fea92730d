"""Signs and means on a GPU: one launch encodes a message (two if blocks are tensors), one decodes all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found]
from torch import Tensor

from laconic.core.deferred import check
from laconic.core.errors import WireError
from laconic.core.framing import sent_to
from laconic.core.layout import Segments
from laconic.kernels import checks, dispatch
from laconic.kernels.sign.plan import plan
from laconic.kernels.sign.reference import BAD_MEAN, BAD_PADDING
from laconic.kernels.sign.triton_kernels import add_kernel, encode_kernel, mean_kernel, validate_kernel

OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
CHECKED = 64  # tiles that a program validates


def encode(
    x: Tensor,
    segments: Segments,
    block: int,
    keys: Sequence[int] | None,
    *,
    apart: bool = False,
    opposite: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the message, or with `apart` [means | signs]; and whether a mean is not finite.

    With `opposite` 255 the coins are the complement of those with 0.
    """
    tables = plan(segments, block, apart, x.device)
    wire = torch.empty(tables.nbytes, dtype=torch.uint8, device=x.device)
    flag = torch.zeros(1, dtype=torch.int32, device=x.device)
    slots = tables.all.shape[1] if block == 0 else 1
    partial = torch.empty(slots, dtype=torch.float64, device=x.device)
    drawn = flag if keys is None else sent_to(checks.keys64(keys, len(segments)), x.device)
    with dispatch.device_of(x):
        for table, masked in ((tables.full, False), (tables.last, True)):
            if (count := table.shape[1]) > 0:
                encode_kernel[(count,)](
                    x, wire, flag, partial, drawn, table, count, opposite, BLOCK=block, TOSS=keys is not None,
                    ALIGNED=tables.aligned, MASKED=masked, **OPTIONS,
                )  # fmt: skip
        if block == 0 and (count := tables.tensors.shape[1]) > 0:
            mean_kernel[(count,)](
                wire, flag, partial, tables.tensors, count, num_warps=4, enable_fp_fusion=False
            )
    return wire, flag


def add_(
    wires: Sequence[Tensor], segments: Segments, out: Tensor, alpha: float, block: int, *, apart: bool = False
) -> Tensor:
    """Add alpha times these messages, in order, once all are valid.

    With `apart` they are [values | signs], with any values.
    """
    if not segments.numel:
        return out
    tables, n = plan(segments, block, apart, out.device), len(wires)
    flags = torch.zeros(2 * n + 1, dtype=torch.int32, device=out.device)
    pointers = sent_to(
        torch.tensor([wire.data_ptr() for wire in wires], dtype=torch.int64, device="cpu"), out.device
    )
    tiles = tables.all.shape[1]
    with dispatch.device_of(out):
        validate_kernel[(triton.cdiv(tiles, CHECKED), n)](
            pointers, flags, tables.all, tiles, n, BLOCK=block, MEANS=not apart, TILES=CHECKED, num_warps=4
        )
        for table, masked in ((tables.full, False), (tables.last, True)):
            if (count := table.shape[1]) > 0:
                add_kernel[(count,)](
                    out, pointers, flags, table, count, n, float(alpha), BLOCK=block, ALIGNED=tables.aligned,
                    MASKED=masked, **OPTIONS,
                )  # fmt: skip
    check(flags[: 2 * n], _invalid)
    return out


def _invalid(i: int) -> WireError:
    error = WireError((BAD_MEAN, BAD_PADDING)[i % 2])
    error.message = i // 2
    return error
