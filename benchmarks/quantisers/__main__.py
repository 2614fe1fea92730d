"""Time of quantisers on one thread, relative to `copy_` and to the same in torch operations.

    python -m benchmarks.quantisers            15 rounds; writes benchmarks/quantisers/results.json
    python -m benchmarks.quantisers --quick    4 rounds; writes nothing

One tensor of 25 M elements through the public codecs, `encode(x, key)` and `decode_add_(wire, out, alpha)`,
and ResNet-50's 161 tensors in one message; `benchmarks/common/timing.py` says how times are measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.machine import machine
from benchmarks.common.resnet50 import SIZES
from benchmarks.common.timing import Call, Row, ratio, rounds, save, show
from laconic.core.codec import Codec
from laconic.core.layout import Segments
from laconic.core.spec import parse

BUCKET = 512
N = 48_832 * BUCKET  # 25 M, in whole buckets, for torch's sake
RESULT = Path(__file__).with_name("results.json")
BARRED = ("qsgd(levels=7)", "ternary()", "natural()", "sign()", "minmax()")
OTHERS = (
    "qsgd(levels=1)",
    "qsgd(levels=127)",
    "minmax(bits=8)",
    "minmax(rounding='stochastic')",
    "nuqsgd()",
    "natural_dithering()",
    "ternary(packing='base3')",
    "natural(bits=8)",
    "cutoff()",
)


def torch_qsgd(x: Tensor) -> tuple[Tensor, Tensor]:
    """`qsgd(levels=7)` in torch operations: norms float32 (B,), and two codes to a byte."""
    buckets = x.view(-1, BUCKET)
    size = buckets.abs()
    norm = size.amax(dim=1, keepdim=True)
    level = size.mul_(7 / norm).add_(torch.rand_like(size)).floor_().clamp_(max=7).to(torch.uint8)
    code = level.add_(torch.signbit(buckets), alpha=8).view(-1, 2)
    return norm.view(-1), code[:, 0] | code[:, 1] << 4


def torch_qsgd_add_(wire: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
    """out += what `torch_qsgd` made."""
    norm, packed = wire
    code = torch.stack([packed & 15, packed >> 4], dim=1).view(-1, BUCKET)
    size = (code & 7).to(torch.float32).mul_(norm[:, None] / 7)
    return out.add_(torch.where(code > 7, -size, size).view(-1))


def torch_ternary(x: Tensor) -> tuple[Tensor, Tensor]:
    """`ternary()` in torch operations, one uniform number an element: the scale, and four codes to a byte."""
    size = x.abs()
    scale = torch.minimum(size.amax(), 2.5 * x.std(correction=0))
    kept = torch.rand_like(size).mul_(scale) < size
    code = kept.to(torch.uint8).add_(torch.signbit(x), alpha=2).view(-1, 4)
    return scale, code[:, 0] | code[:, 1] << 2 | code[:, 2] << 4 | code[:, 3] << 6


def torch_ternary_add_(wire: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
    """out += what `torch_ternary` made."""
    scale, packed = wire
    code = torch.stack([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6], dim=1).view(-1)
    table = torch.stack([scale * 0, scale, scale * 0, -scale])
    return out.add_(table[code.to(torch.int32)])


def passes(x: Tensor, out: Tensor, count: int) -> list[Row]:
    """Encoding and decoding of each codec, beside `copy_`."""
    copy = torch.zeros_like(x)
    rows: list[Row] = []
    for spec in (*BARRED, *OTHERS):
        codec: Codec = parse(spec)
        wire = codec.encode(x, 1)
        calls: dict[str, Call] = {
            "copy_": lambda: copy.copy_(x),
            "encode": lambda c=codec: c.encode(x, 1),
            "decode-add": lambda c=codec, w=wire: c.decode_add_(w, out, 0.25),
        }
        times, bar = rounds(calls, count), 1.5 if spec in BARRED else None
        bits = f"{8 * wire.numel() / x.numel():.3g} bits"
        for name in ("encode", "decode-add"):
            figure, _, detail = ratio(times, name, "copy_", bar)
            rows.append((f"{spec} {name}", "x copy_", figure, bar, f"{detail}; {bits}"))
    return rows


def against_torch(x: Tensor, out: Tensor, count: int) -> list[Row]:
    """The same methods in plain torch operations, as multiples of ours."""
    rows: list[Row] = []
    for spec, encode, add_ in (
        ("qsgd(levels=7)", torch_qsgd, torch_qsgd_add_),
        ("ternary()", torch_ternary, torch_ternary_add_),
    ):
        codec: Codec = parse(spec)
        wire, theirs = codec.encode(x, 1), encode(x)
        calls: dict[str, Call] = {
            "ours": lambda c=codec: c.encode(x, 1),
            "torch": lambda e=encode: e(x),
            "our add": lambda c=codec, w=wire: c.decode_add_(w, out),
            "torch add": lambda a=add_, w=theirs: a(w, out),
        }
        times = rounds(calls, count)
        rows.append((f"{spec} encode in torch operations", "x ours", *ratio(times, "torch", "ours", -20.0)))
        rows.append(
            (f"{spec} decode-add in torch operations", "x ours", *ratio(times, "torch add", "our add", None))
        )
        speed = 4 * x.numel() / min(times["ours"]) / 1e9
        rows.append((f"{spec} encode", "GB/s of float32", speed, None, "least of the times"))
    return rows


def many_tensors(count: int) -> list[Row]:
    """ResNet-50's 161 tensors in one message, against one flat tensor of as many elements."""
    flat, parts = Segments.whole(sum(SIZES)), Segments.consecutive(SIZES)
    x, rows = torch.randn(flat.numel), []
    out = torch.zeros_like(x)
    for spec in BARRED:
        codec: Codec = parse(spec)
        calls: dict[str, Call] = {}
        for name, segments in (("flat", flat), ("parts", parts)):
            keys = list(range(len(segments)))
            wire = codec.encode_segments(x, segments, keys)
            calls[name] = lambda c=codec, s=segments, k=keys: c.encode_segments(x, s, k)
            calls[f"{name} add"] = lambda c=codec, s=segments, w=wire: c.decode_segments_add_(w, s, out)
        times = rounds(calls, count)
        rows.append((f"161 tensors, {spec} encode", "x one flat tensor", *ratio(times, "parts", "flat", 1.5)))
        rows.append(
            (
                f"161 tensors, {spec} decode-add",
                "x one flat tensor",
                *ratio(times, "parts add", "flat add", 1.5),
            )
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, no file")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    count = 4 if quick else 15
    x, out = torch.randn(N, generator=torch.Generator().manual_seed(0)), torch.zeros(N)
    rows = [*passes(x, out, count), *against_torch(x, out, max(3, count // 4)), *many_tensors(count)]
    about: dict[str, Any] = {**machine(), "threads": 1, "n": N, "rounds": count}
    show(f"quantisers: {N:,} float32, one thread, {about['kernels']}", rows)
    if not quick:
        save(RESULT, about, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
