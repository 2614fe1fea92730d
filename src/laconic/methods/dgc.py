"""Deep Gradient Compression: send the largest thousandth of the accumulated gradients, store the rest.

Lin et al. 2018, arXiv:1712.01887. Verified against the authors' release (synxlin/deep-gradient-compression),
whose selection drops candidates by position; here the largest are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict

from laconic.codecs.dense import Dense
from laconic.codecs.indices.golomb import GOLOMB
from laconic.codecs.selectors.density_schedule import DensitySchedule
from laconic.codecs.selectors.sampled_topk import SampledTopK
from laconic.codecs.sparse import Sparse
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.selector import IndexCoding, check_density
from laconic.exchange.method import Method, Route, everything, matrices, method, routes
from laconic.feedback.momentum_correction import MomentumCorrection
from laconic.reducers import Reducer
from laconic.reducers.dense_first import DenseFirst
from laconic.reducers.gather import Gather
from laconic.reducers.server import Server
from laconic.reducers.sum import Sum

DENSE = Dense()
FIRST = 0.25  # the paper's


@method(
    paper="Lin et al. 2018, arXiv:1712.01887",
    status="verified",
    code="synxlin/deep-gradient-compression",
    sends="the largest entries of the accumulated velocity, and their positions",
    examples=("dgc(density=0.01, down=0.01)",),
)
def dgc(
    density: float = 0.001,
    *,
    warmup_steps: int = 0,
    warmup: Sequence[float] | None = None,
    sample_ratio: float = 0.01,
    masking: bool = True,
    clip: float | None = None,
    down: float | None = None,
    values: Codec = DENSE,
    indices: IndexCoding = GOLOMB,
    vectors: str = "fp32",
) -> Method:
    """Per tensor of two dimensions and more, on each rank, with SGD's momentum mu:

        u = mu * u + g        v = v + u         (Nesterov: u = mu * (u + g), v = v + u + g)
        S = top density * n of |v|, by a sampled threshold
        send v[S];            v[S] = 0,  u[S] = 0
        w = w - lr * (mean of the sent shares + weight decay)

    One-dimensional tensors are summed uncompressed, with SGD's own momentum. The momentum is that of a
    `torch.optim.SGD` or `laconic.optim.LARS`; other optimisers have plain error feedback, which is logged.

    Payload: about density * n * (32 + log2(1 / density) + 1.5) bits, to each of the N - 1 others. With
    `down`, servers of the entries answer with the share `down` (see `server`): in large models a rank sends
    little more among 64 ranks than among 4 (docs/scaling.md).

    Args:
        density: Share of entries sent, in (0, 1].
        warmup_steps: Approximate number of first steps with a higher density.
        warmup: Densities of the warm-up, in equal stages. None: 0.25, 0.0625, ... down to `density`. A
            leading 1.0 is plain momentum SGD.
        sample_ratio: Share of entries that the threshold is estimated from.
        masking: Whether sent entries are also cleared in u.
        clip: Norm of the gradient summed over ranks; each rank's gradient is limited to clip / sqrt(N), after
            dense warm-up steps (see `laconic.exchange.clip`).
        down: Share of entries that servers answer, in (0, 1], and at least that of a warm-up's stage; for 16
            ranks and more. None: every rank receives every message.
        values: Codec of the values.
        indices: Coding of the positions.
        vectors: Type of one-dimensional tensors on the wire.

    Raises:
        SpecError: An argument is out of range.

    >>> dgc(density=0.01, warmup_steps=400)
    dgc(density=0.01, warmup_steps=400)
    """
    check_density(density)
    if down is not None:
        arguments.number("dgc: down", down, above=0, most=1, hint="None sends every message to every rank")
    select = SampledTopK(density, sample_ratio=sample_ratio)
    final = Sparse(select, values=values, indices=indices)
    kept = MomentumCorrection(masking=masking, clip=clip)
    if density == 1 and clip is not None:
        raise SpecError(f"clip={clip} limits delayed entries, but density=1 delays none: remove clip")
    stages = _stages(density, warmup_steps, warmup)
    if density == 1 and all(stage == 1 for stage in stages):
        return routes(Route(everything, Sum(dtype=vectors)))
    every = max(1, round(warmup_steps / len(stages))) if stages else 1
    dense_steps = every * next((i for i, stage in enumerate(stages) if stage < 1), len(stages))
    feedback = replace(kept, dense_steps=dense_steps)

    def scheduled(select: SampledTopK) -> Sparse:
        higher = [max(stage, select.density) for stage in stages]
        return replace(final, select=DensitySchedule(select, tuple(higher), every) if stages else select)

    reducer: Reducer = Gather(scheduled(select))
    if down is not None:
        reducer = Server(scheduled(select), scheduled(replace(select, density=down)))
    if dense_steps:
        reducer = DenseFirst(reducer, dense_steps)
    return routes(
        Route(matrices, reducer, feedback),
        Route(everything, Sum(dtype=vectors)),
    )


class Warmup(TypedDict):
    warmup_steps: int
    warmup: tuple[float, ...]


def by_epoch(density: float = 0.001, *, epochs: int = 4, steps_per_epoch: int) -> Warmup:
    """Return the paper's warm-up: density 1/4 in the first epoch, a quarter of that in the next, etc.

    Args:
        density: Final density.
        epochs: Epochs with a higher density.
        steps_per_epoch: Optimiser steps of an epoch.

    Returns:
        Arguments for `dgc`.

    Raises:
        SpecError: An argument is out of range.

    >>> dgc(density=0.01, **by_epoch(0.01, epochs=3, steps_per_epoch=500))
    dgc(density=0.01, warmup_steps=1500, warmup=(0.25, 0.0625, 0.015625))
    """
    check_density(density)
    arguments.whole("by_epoch: epochs", epochs, 1)
    arguments.whole("by_epoch: steps_per_epoch", steps_per_epoch, 1)
    densities = tuple(max(FIRST ** (epoch + 1), density) for epoch in range(epochs))
    return Warmup(warmup_steps=epochs * steps_per_epoch, warmup=densities)


def _stages(density: float, steps: int, given: Sequence[float] | None) -> tuple[float, ...]:
    arguments.whole("dgc: warmup_steps", steps)
    if given is not None:
        if not isinstance(given, (tuple, list)) or not given:
            raise SpecError(f"warmup must be densities, such as (0.25, 0.0625), or None, got {given!r}")
        if not steps:
            raise SpecError(f"warmup={list(given)} needs a number of steps: set warmup_steps, got 0")
        for stage in given:
            check_density(stage)
        falls = all(a >= b for a, b in zip([*given], [*given[1:], density], strict=True))
        if not falls:
            raise SpecError(f"warmup densities must fall towards density={density}, got {list(given)}")
        return tuple(given)
    stages: list[float] = []
    while steps and FIRST ** (len(stages) + 1) > density and len(stages) < steps:
        stages.append(FIRST ** (len(stages) + 1))
    return tuple(stages)
