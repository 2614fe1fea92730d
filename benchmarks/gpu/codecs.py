"""Part codecs: each registered codec on the GPU against the reference on the CPU, and its host waits.

Wires and decoded values are compared for several inputs, messages of eight ranks are decoded in one call and
one after another, and one message of a large model is timed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu import inputs
from benchmarks.gpu.compare import Waits, difference, outcome, relative, same
from benchmarks.gpu.job import Job, Row, brief
from benchmarks.gpu.timing import host_us
from laconic import kernels
from laconic.core.codec import Codec
from laconic.core.layout import Segments
from laconic.core.spec import parse

SIZES = (1200, 40, 65537, 7, 0, 4097)
BIG = (2359296,) * 6 + (1048576,) * 8 + (294912,) * 20 + (2048,) * 60 + (256,) * 60  # like ResNet-50
KINDS = ("cubes", "constant", "denormal", "ties", "huge", "zeros", "minus zero")
RANKS = 8
WITHIN = 1e-5  # |a - b| / |b| of decoded values where scales are sums of float64
NEAR = ("sign", "l2", "mean", "clip", "ternary", "hierarchy", "quantile", "centroids", "dct", "cutoff")


def run(job: Job) -> None:
    """Compare this shard's codecs. `adaptive_hierarchy` is last: it takes seconds for a message."""
    from tests.laws.table import specs  # the registry's examples

    every = sorted(specs(Codec), key=lambda spec: ("adaptive" in spec, spec))
    segments = Segments.consecutive(SIZES)
    big = Segments.consecutive(BIG if job.cuda else [n // 256 for n in BIG])
    x = inputs.values("cubes", big.numel).to(job.device)
    for spec in job.mine(every):
        if job.left() < 12:
            job.skip(spec, "no time")
            continue
        failures, near = compared(parse(spec), segments, job.device, any(word in spec for word in NEAR))
        job.check(spec, not failures, failures=failures[:5], near=near)
        if not failures and job.left() > 15:
            try:
                job.note(f"{spec}: {big.numel} elements in {len(big)} tensors", **speed(parse(spec), x, big))
            except Exception as error:
                job.fail(f"{spec}: {big.numel} elements", error)


def compared(
    codec: Codec, segments: Segments, device: torch.device, may_differ: bool
) -> tuple[list[str], list[str]]:
    """Return how wires and decoded values differ, and where they differ by the last places of scales."""
    failures: list[str] = []
    near: list[str] = []
    for kind in KINDS:
        x, keys = inputs.values(kind, segments.numel), inputs.keys(len(segments))
        with kernels.using("reference"):
            wire, refused = outcome(lambda: codec.encode_segments(x, segments, keys))  # noqa: B023
        found, error = outcome(lambda: codec.encode_segments(x.to(device), segments, keys))  # noqa: B023
        again, _ = outcome(lambda: codec.encode_segments(x.to(device), segments, keys))  # noqa: B023
        if refused is not None or error is not None:
            if type(refused) is not type(error):
                failures.append(f"{kind}: {_shown(error)}, the reference: {_shown(refused)}")
            continue
        if found.device != device:
            failures.append(f"{kind}: the wire is on {found.device}")
        if not same(found, again):
            failures.append(f"{kind}: two runs differ: {difference(found, again)}")
        if not same(found, wire):
            far = _apart(codec, found, wire, segments)
            text = f"{kind}: wire: {difference(found, wire)}, decoded {far:.1e} apart"
            (near if may_differ and far <= WITHIN else failures).append(text)
        try:
            failures += [f"{kind}: {text}" for text in _decoded(codec, wire, segments, device)]
        except Exception as problem:
            failures.append(f"{kind}: decoding: {brief(problem)}")
    return failures, near


def _apart(codec: Codec, found: Tensor, wire: Tensor, segments: Segments) -> float:
    zeros = torch.zeros(segments.numel)
    with kernels.using("reference"):
        ours, error = outcome(lambda: codec.decode_segments_add_(found.cpu(), segments, zeros.clone()))
        theirs = codec.decode_segments_add_(wire, segments, zeros.clone())
    return relative(ours, theirs) if error is None else float("inf")


def _decoded(codec: Codec, wire: Tensor, segments: Segments, device: torch.device) -> list[str]:
    """Return how one message, and those of eight ranks in one call, decode differently on the device."""
    start = inputs.values("normal", segments.numel, seed=1)
    messages = [(wire, segments)] * RANKS
    with kernels.using("reference"):
        one = codec.decode_segments_add_(wire, segments, start.clone(), 0.37)
        several = start.clone()
        for each, part in messages:
            codec.decode_segments_add_(each, part, several, 1 / RANKS)
    there = [(each.to(device), part) for each, part in messages]
    found = codec.decode_segments_add_(wire.to(device), segments, start.to(device, copy=True), 0.37)
    together = codec.decode_messages_add_(there, start.to(device, copy=True), 1 / RANKS)
    pairs = (("decoded", found, one), (f"{RANKS} messages", together, several))
    return [f"{name}: {difference(ours, true)}" for name, ours, true in pairs if not same(ours, true)]


def speed(codec: Codec, x: Tensor, segments: Segments) -> Row:
    """Return milliseconds, host waits and memory of one message of a large model."""
    keys, device = inputs.keys(len(segments)), x.device
    with Waits(device) as encoding:
        wire = codec.encode_segments(x, segments, keys)
    out = torch.zeros_like(x)
    with Waits(device) as decoding:
        codec.decode_segments_add_(wire, segments, out)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row: Row = {
        "encode_ms": host_us([lambda: codec.encode_segments(x, segments, keys)], device, 3) / 1e3,
        "decode_ms": host_us([lambda: codec.decode_segments_add_(wire, segments, out)], device, 3) / 1e3,
        "encode_waits": encoding.count,
        "encode_where": encoding.where,
        "decode_waits": decoding.count,
        "decode_where": decoding.where,
        "nbytes": wire.numel(),
    }
    if device.type == "cuda":
        row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return row


def _shown(error: BaseException | None) -> str:
    return "no error" if error is None else brief(error)
