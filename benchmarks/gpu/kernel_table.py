"""Kernels that the checks call: pairs of an encoder and a decoder, and functions, by their public names.

Each is called on CUDA tensors, where Triton serves it if it has a kernel, and on the CPU with the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.inputs import Input
from laconic import kernels
from laconic.core.layout import Segments
from laconic.kernels import Form, Measure, MinMaxForm

Keys = Sequence[int]
Encode = Callable[[Tensor, Segments, Keys], Tensor]
Add = Callable[[Tensor, Segments, Tensor, float], Tensor]


@dataclass(frozen=True)
class Pair:
    """An encoder of one message, and the decoder that adds it to a buffer.

    Args:
        exact: The wire equals the reference's bit for bit. It does not where scales come from sums of
            float64, which have no fixed order: these differ by 1 unit in the last place.
        ties: Kind of `inputs.tied` that makes its random rounding read all 24 bits, if it rounds at random.
    """

    name: str
    encode: Encode
    add: Add
    exact: bool = True
    ties: str | None = None


def _minmax(bits: int, block: int, rounding: str, ties: str | None = None) -> Pair:
    def form(segments: Segments) -> MinMaxForm:
        return MinMaxForm((bits,) * len(segments), block, rounding)

    return Pair(
        f"minmax({bits} bits, block {block}, {rounding})",
        lambda x, segments, keys: kernels.minmax_encode(x, segments, keys, form(segments)),
        lambda wire, segments, out, alpha: kernels.minmax_add_(wire, segments, out, form(segments), alpha),
        ties=ties,
    )


def _mixed_widths(rounding: str) -> Pair:
    def form(segments: Segments) -> MinMaxForm:
        return MinMaxForm(tuple(1 + i % 8 for i in range(len(segments))), 512, rounding)

    return Pair(
        f"minmax(1 to 8 bits, {rounding})",
        lambda x, segments, keys: kernels.minmax_encode(x, segments, keys, form(segments)),
        lambda wire, segments, out, alpha: kernels.minmax_add_(wire, segments, out, form(segments), alpha),
    )


def _quantise(name: str, form: Form, measure: Measure, exact: bool = True, ties: str | None = None) -> Pair:
    return Pair(
        f"quantise({name})",
        lambda x, segments, keys: kernels.quantise(x, segments, keys, form, measure),
        lambda wire, segments, out, alpha: kernels.dequantise_add_(wire, segments, out, form, alpha),
        exact,
        ties,
    )


def _sign(block: int, drawn: bool = False) -> Pair:
    return Pair(
        f"sign(block {block}{', zeros drawn' if drawn else ''})",
        lambda x, segments, keys: kernels.sign_encode(x, segments, block, keys if drawn else None),
        lambda wire, segments, out, alpha: kernels.sign_add_(wire, segments, out, alpha, block),
        exact=False,
    )


def _natural(bits: int) -> Pair:
    return Pair(
        f"natural({bits} bits)",
        lambda x, segments, keys: kernels.natural_encode(x, segments, keys, bits),
        lambda wire, segments, out, alpha: kernels.natural_add_(wire, segments, out, alpha, bits),
        ties="powers",
    )


LARGEST, L2, MEAN = Measure("max"), Measure("l2"), Measure("mean")
PAIRS = (
    _minmax(4, 512, "nearest"),
    _minmax(4, 512, "stochastic", ties="levels"),
    _minmax(8, 512, "nearest"),
    _minmax(3, 100, "stochastic"),
    _minmax(1, 64, "nearest"),
    _minmax(2, 1024, "stochastic"),
    _mixed_widths("nearest"),
    _mixed_widths("stochastic"),
    _quantise("levels 7, block 512", Form(7, 512), LARGEST, ties="sevens"),
    _quantise("levels 7, block 0", Form(7), LARGEST, ties="sevens"),
    _quantise("levels 1, block 100", Form(1, 100), LARGEST),
    _quantise("levels 1, block 0, base 3", Form(1, 0, packing="base3"), LARGEST, ties="unit"),
    _quantise("levels 1, block 512, base 3", Form(1, 512, packing="base3"), LARGEST, ties="unit"),
    _quantise("levels 1, block 0, clip 2.5", Form(1), Measure("max", 2.5), exact=False),
    _quantise("levels 127, block 4096", Form(127, 4096), LARGEST),
    _quantise("levels 1000, block 77", Form(1000, 77), LARGEST),
    _quantise("levels 8, powers, block 512", Form(8, 512, "powers"), LARGEST, ties="unit"),
    _quantise("levels 5, block 0, l2", Form(5), L2, exact=False),
    _quantise("levels 7, block 512, mean", Form(7, 512), MEAN, exact=False),
    _sign(0),
    _sign(64),
    _sign(37),
    _sign(0, drawn=True),
    _natural(9),
    _natural(8),
)


Results = list[Tensor]


@dataclass(frozen=True)
class Function:
    """A kernel that is no codec: it returns its results, and the buffers that it has changed.

    `run(x, given)` gets the buffer, on the device that it shall run on, and the input with the segments.
    """

    name: str
    run: Callable[[Tensor, Input], Results]
    exact: bool = True


def other(x: Tensor, seed: int = 1) -> Tensor:
    """Return another buffer like x, the same on every device."""
    return (torch.randn(x.numel(), generator=torch.Generator().manual_seed(seed)) / 3).to(x.device)


def _flag(value: object) -> Tensor:
    return torch.tensor(bool(value))


def _accumulate(x: Tensor, given: Input) -> Results:
    residual, old = other(x), x.clone()
    finite = kernels.accumulate_(residual, old, given.segments, scale=0.37, decay=0.9, keep=True)
    return [residual, old, _flag(finite)]


def _plain_accumulate(x: Tensor, given: Input) -> Results:
    residual = other(x)
    return [_flag(kernels.accumulate_(residual, x, given.segments)), residual]


def _velocity(nesterov: bool, ahead: float = 0.0) -> Callable[[Tensor, Input], Results]:
    def run(x: Tensor, given: Input) -> Results:
        velocity, residual, old = other(x, 1), other(x, 2), x.clone()
        fresh = residual.clone()
        momentum = torch.tensor([0.9, 0.5, 0.0] * len(given.segments))[: len(given.segments)]
        finite = kernels.velocity_(
            velocity, residual, old, fresh, given.segments, momentum, 0.37, nesterov, ahead
        )
        return [velocity, old, fresh, _flag(finite)]

    return run


def _add_sparse(x: Tensor, given: Input) -> Results:
    y = other(x) * (other(x, 3).abs() > 0.6)
    return [kernels.add_sparse_(x.clone(), y, 0.37)]


def _all_finite(x: Tensor, given: Input) -> Results:
    return [_flag(kernels.all_finite(x, given.segments))]


def _norms(measure: Measure, block: int) -> Callable[[Tensor, Input], Results]:
    return lambda x, given: [kernels.norms(x, given.segments, measure, block)]


def _levels(x: Tensor, given: Input) -> Results:
    form = Form(7, 512)
    scales, levels = kernels.quantise_levels(x, given.segments, given.keys, form)
    out = kernels.levels_add_(levels, scales, given.segments, other(x), form, 0.37)
    return [scales, levels, out]


def _given_scales(x: Tensor, given: Input) -> Results:
    form = Form(1)
    scales = kernels.norms(x, given.segments)
    return [kernels.quantise(x, given.segments, given.keys, form, Measure(scales=scales))]


def _signs(x: Tensor, given: Input) -> Results:
    bits, means = kernels.signs(x, given.segments)
    values = torch.linspace(0.1, 2.0, len(given.segments)).to(x.device)
    return [bits, kernels.signed_add_(bits, values, given.segments, other(x), 0.37), means]


def _zeros(x: Tensor, given: Input) -> Results:
    return [kernels.zeros(x, given.segments)]


def _pack(bits: int) -> Callable[[Tensor, Input], Results]:
    def run(x: Tensor, given: Input) -> Results:
        codes = x.view(torch.int32) & ((1 << bits) - 1)
        wire = kernels.pack_bits(codes, bits)
        return [wire, kernels.unpack_bits(wire, bits, codes.numel())]

    return run


def _ternary(x: Tensor, given: Input) -> Results:
    levels = (x.view(torch.int32) >> 20).remainder(3) - 1
    wire = kernels.pack_ternary(levels)
    return [wire, kernels.unpack_ternary(wire, levels.numel())]


def counts_of(segments: Segments, density: float) -> Tensor:
    """Return int64 (s,): this share of each segment, rounded up."""
    return torch.tensor([math.ceil(density * n) for n in segments.sizes], dtype=torch.int64)


def _topk(x: Tensor, given: Input) -> Results:
    return [*kernels.topk(x, given.segments, counts_of(given.segments, 0.01))]


def _sampled_topk(density: float) -> Callable[[Tensor, Input], Results]:
    def run(x: Tensor, given: Input) -> Results:
        ks = counts_of(given.segments, density)
        return [*kernels.sampled_topk(x, given.segments, ks, density, 0.01, given.keys)]

    return run


def _above(x: Tensor, given: Input) -> Results:
    return [*kernels.above(x, given.segments, torch.full((len(given.segments),), 0.9))]


def _entries(x: Tensor, given: Input) -> Results:
    indices, counts = kernels.above(x, given.segments, torch.full((len(given.segments),), 0.9))
    values = kernels.gather(x, given.segments, indices, counts)
    out = kernels.scatter_add_(other(x), given.segments, indices, counts, values, 0.37)
    return [values, out, kernels.scatter_zero_(other(x, 2), given.segments, indices, counts)]


def _positions(x: Tensor, given: Input) -> Results:
    indices, counts = kernels.above(x, given.segments, torch.full((len(given.segments),), 0.9))
    results = []
    for encode, decode in (
        (kernels.rice_encode, kernels.rice_decode),
        (kernels.delta_encode, kernels.delta_decode),
        (kernels.gap_widths_encode, kernels.gap_widths_decode),
    ):
        wire = encode(indices, counts, given.segments)
        results += [wire, decode(wire, counts, given.segments)]
    return results


def _random(x: Tensor, given: Input) -> Results:
    n, key = x.numel(), given.keys[0]
    return [
        kernels.dither24(key, n, device=x.device),
        kernels.dither24(key, n, (1 << 32) - 5, device=x.device),
        kernels.uniform(key, n, 3, device=x.device),
        kernels.philox(key, n, device=x.device),
    ]


FUNCTIONS = (
    Function("accumulate_(scale, decay)", _accumulate),
    Function("accumulate_", _plain_accumulate),
    Function("velocity_", _velocity(nesterov=False)),
    Function("velocity_(nesterov)", _velocity(nesterov=True)),
    Function("velocity_(ahead)", _velocity(nesterov=True, ahead=0.5)),
    Function("all_finite", _all_finite),
    Function("add_sparse_", _add_sparse),
    Function("norms(max, block 512)", _norms(LARGEST, 512)),
    Function("norms(max, block 0)", _norms(LARGEST, 0)),
    Function("norms(l2, block 0)", _norms(L2, 0), exact=False),
    Function("quantise_levels, levels_add_", _levels),
    Function("quantise(given scales)", _given_scales),
    Function("signs, signed_add_", _signs, exact=False),
    Function("zeros", _zeros),
    *(Function(f"pack_bits({bits})", _pack(bits)) for bits in (1, 2, 4, 7, 13)),
    Function("pack_ternary", _ternary),
    Function("topk", _topk),
    Function("sampled_topk(0.01)", _sampled_topk(0.01)),
    Function("sampled_topk(0.001)", _sampled_topk(0.001)),
    Function("above", _above),
    Function("gather, scatter_add_, scatter_zero_", _entries),
    Function("rice, delta, gap_widths", _positions),
    Function("dither24, uniform, philox", _random),
)
