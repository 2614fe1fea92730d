"""Part bandwidth: kernels against a copy of as many bytes, and against the reference on the same card.

Bytes are those that the operation has to read and write: an encoder reads x and writes the wire, a decoder
reads the wires and reads and writes the buffer that it adds to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common.resnet50 import SIZES
from benchmarks.gpu import inputs
from benchmarks.gpu.compare import Waits
from benchmarks.gpu.job import Job, Row
from benchmarks.gpu.kernel_table import counts_of
from benchmarks.gpu.timing import busy_us, copy_us, gpu_us, host_us
from laconic import kernels
from laconic.core.layout import Segments
from laconic.core.spec import parse
from laconic.kernels import Form, MinMaxForm

RANKS = 8
BUFFERS = 3
ONE = 1 << 26
# Least shares of a copy, for 161 tensors and for one: those of drafts of the kernels, USUAL for all others.
SHARES = {
    "minmax encode nearest": (0.69, 0.81),
    "minmax encode stochastic": (0.34, 0.36),
    "minmax decode of 8": (0.61, 0.66),
    "accumulate": (1.05, 1.02),
    "velocity": (1.01, 0.93),
    "sign encode": (0.84, 0.80),
    "sign decode of 8": (0.48, 0.53),
}
USUAL = 0.5
SLACK = 0.97  # of a share: what two runs of one kernel differ by


@dataclass(frozen=True)
class Timed:
    """A kernel to time: its calls, each with other buffers, and the bytes that a call moves."""

    name: str
    calls: list[Callable[[], object]]
    nbytes: int
    judged: bool = True


def run(job: Job) -> None:
    """Time all kernels for the 161 tensors of ResNet-50, then for one tensor."""
    divide = 1 if job.cuda else 256
    cases = {
        "161 tensors": Segments.consecutive([max(1, size // divide) for size in SIZES]),
        "one tensor": Segments.whole(ONE // divide),
    }
    for place, (label, segments) in enumerate(cases.items()):
        for make in MAKERS:
            name = f"{make.__name__.lstrip('_').replace('_', ' ')}, {label}"
            if job.left() < 6:
                job.skip(name, "no time")
                continue
            try:
                for kernel in make(segments, job.device):
                    measure(job, kernel, label, place)
            except Exception as error:
                job.fail(name, error)
            if job.cuda:
                torch.cuda.empty_cache()


def measure(job: Job, kernel: Timed, label: str, place: int) -> None:
    """Time one kernel, and compare it with the copy and the reference."""
    device = job.device
    copy = copy_us(device, kernel.nbytes)
    kernel.calls[0]()
    with Waits(device) as waits:
        kernel.calls[0]()
    us = busy_us(kernel.calls, device) if waits.count else gpu_us(kernel.calls, device)
    figures: Row = {
        "us": us,
        "gb_per_s": kernel.nbytes / us / 1e3,
        "share": copy / us,
        "host_us": host_us(kernel.calls, device),
        "waits": waits.count,
    }
    if job.left() > 15:
        with kernels.using("reference"):
            figures["reference_us"] = host_us(kernel.calls[:1], device, rounds=2)
        figures["times"] = figures["reference_us"] / us
    name = f"{kernel.name}, {label}"
    row: Row = {"figures": figures, "nbytes": kernel.nbytes, "where": waits.where}
    if kernel.judged and job.cuda:
        figures["least"] = SHARES.get(kernel.name, (USUAL, USUAL))[place]
        job.check(name, figures["share"] >= SLACK * figures["least"], **row)
    else:
        job.note(name, **row)


def _buffers(segments: Segments, device: torch.device, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    first = torch.randn(segments.end, generator=rng) ** 3
    return [first.to(device, copy=True) for _ in range(BUFFERS)]


def _codec(
    spec: str, name: str, segments: Segments, device: torch.device, encoder: bool = True
) -> list[Timed]:
    """Return the encoder of a codec, and its decoder of the messages of 8 ranks."""
    codec, keys = parse(spec), inputs.keys(len(segments))
    buffers = _buffers(segments, device)
    wires = [codec.encode_segments(x, segments, keys) for x in buffers]
    size = wires[0].numel()
    encode = [lambda x=x: codec.encode_segments(x, segments, keys) for x in buffers]
    found = [Timed(f"{name} encode", encode, 4 * segments.numel + size)] if encoder else []
    room = torch.cat([wires[i % BUFFERS] for i in range(RANKS)])  # one buffer, as a group receives them
    messages = [(wire, segments) for wire in torch.split(room, size)]
    decode = [lambda x=x: codec.decode_messages_add_(messages, x, 1 / RANKS) for x in buffers]
    return [*found, Timed(f"{name} decode of {RANKS}", decode, 8 * segments.numel + RANKS * size)]


def _minmax(segments: Segments, device: torch.device) -> list[Timed]:
    found = _codec("minmax(bits=4)", "minmax", segments, device, encoder=False)
    buffers, keys = _buffers(segments, device), inputs.keys(len(segments))
    for rounding in ("nearest", "stochastic"):
        form = MinMaxForm((4,) * len(segments), 512, rounding)
        calls = [lambda x=x, form=form: kernels.minmax_encode(x, segments, keys, form) for x in buffers]
        nbytes = 4 * segments.numel + form.message_nbytes(segments)
        found.append(Timed(f"minmax encode {rounding}", calls, nbytes))
    return found


def _quantise(segments: Segments, device: torch.device) -> list[Timed]:
    return _codec("qsgd(levels=7, block=512)", "qsgd", segments, device)


def _ternary(segments: Segments, device: torch.device) -> list[Timed]:
    """TernGrad's own form: base 3, and the scale of the whole tensor."""
    form, keys = Form(1, 0, packing="base3"), inputs.keys(len(segments))
    buffers = _buffers(segments, device)
    wires = [kernels.quantise(x, segments, keys, form) for x in buffers]
    size = wires[0].numel()
    encode = [lambda x=x: kernels.quantise(x, segments, keys, form) for x in buffers]
    decode = [
        lambda x=x, wire=wire: kernels.dequantise_add_(wire, segments, x, form, 0.5)
        for x, wire in zip(buffers, wires, strict=True)
    ]
    return [  # one scale for a whole tensor has to be known first: x is read twice
        Timed("ternary base 3 encode", encode, 8 * segments.numel + size),
        Timed("ternary base 3 decode", decode, 8 * segments.numel + size),
    ]


def _sign(segments: Segments, device: torch.device) -> list[Timed]:
    return _codec("sign()", "sign", segments, device)


def _natural(segments: Segments, device: torch.device) -> list[Timed]:
    return [
        *_codec("natural(bits=8)", "natural 8", segments, device),
        *_codec("natural(bits=9)", "natural 9", segments, device),
    ]


def _feedback(segments: Segments, device: torch.device) -> list[Timed]:
    """Accumulation of the residual and of DGC's velocity."""
    n, grads = segments.numel, _buffers(segments, device, 1)
    residuals, velocities = _buffers(segments, device, 2), _buffers(segments, device, 3)
    momentum = torch.full((len(segments),), 0.9)
    add = [
        lambda r=r, g=g: kernels.accumulate_(r, g, segments, scale=0.5)
        for r, g in zip(residuals, grads, strict=True)
    ]
    move = [
        lambda u=u, r=r, g=g: kernels.velocity_(u, r, g, r, segments, momentum, scale=0.1)
        for u, r, g in zip(velocities, residuals, grads, strict=True)
    ]
    return [Timed("accumulate", add, 12 * n), Timed("velocity", move, 24 * n)]


def _select(segments: Segments, device: torch.device) -> list[Timed]:
    """Selection at density 0.001: reading x once is the least, but the host waits for counts."""
    buffers, keys = _buffers(segments, device), inputs.keys(len(segments))
    ks, limits = counts_of(segments, 0.001), torch.full((len(segments),), 12.0)
    sampled = [lambda x=x: kernels.sampled_topk(x, segments, ks, 0.001, 0.01, keys) for x in buffers]
    passing = [lambda x=x: kernels.above(x, segments, limits) for x in buffers]
    exact = [lambda x=x: kernels.topk(x, segments, ks) for x in buffers]
    return [
        Timed("sampled top-k", sampled, 4 * segments.numel, judged=False),
        Timed("above a threshold", passing, 4 * segments.numel, judged=False),
        Timed("exact top-k", exact, 4 * segments.numel, judged=False),
    ]


def _random(segments: Segments, device: torch.device) -> list[Timed]:
    n = segments.numel
    calls = [lambda key=key: kernels.dither24(key, n, device=device) for key in inputs.keys(BUFFERS)]
    return [Timed("dither24", calls, 4 * n)]


MAKERS = (_minmax, _feedback, _sign, _quantise, _ternary, _natural, _select, _random)
