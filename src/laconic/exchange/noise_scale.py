"""Gradient noise scale: the largest useful batch, from the norms of local and mean gradients.

McCandlish et al. 2018, arXiv:1812.06162, section 2.2 and appendix A.1. With G the true gradient and S the
covariance of the gradient of one unit batch, the squared norm over a batch of n units is |G|^2 + tr(S) / n
in expectation. Two batch sizes give both:

    |G|^2 = (n_big |g_big|^2 - n_small |g_small|^2) / (n_big - n_small)
    tr(S) = (|g_small|^2 - |g_big|^2) / (1 / n_small - 1 / n_big)
    noise scale = tr(S) / |G|^2                                              in unit batches

In an exchange a rank's own gradient is one unit, and the mean is `size` units. At a batch as large as the
noise scale, training takes twice the fewest possible steps and examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core.layout import Layout, PerLayout, Segments
from laconic.exchange.method import Method
from laconic.feedback.no_feedback import NoFeedback
from laconic.reducers.sum import Sum

EVERY = 5  # steps between measurements
DECAY = 0.95


@dataclass(frozen=True)
class Noise:
    """Running means of both parts on this rank; average each over ranks.

    Attributes:
        variance: tr(S), of the gradient of one unit batch: in an exchange, a rank's batch.
        signal: |G|^2; noise can make it negative.
        samples: Number of measured steps.
        share: Share of the gradient's entries that were measured.
    """

    variance: float
    signal: float
    samples: int
    share: float = 1.0

    def examples(self, unit: int = 1) -> float:
        """Return the noise scale in examples, for `unit` examples in a unit batch; inf without signal.

        >>> Noise(variance=6.0, signal=2.0, samples=10).examples(unit=32)
        96.0
        """
        return unit * max(self.variance, 0.0) / self.signal if self.signal > 0 else math.inf


class NoiseScale:
    """Running means of single steps' estimates.

    >>> scale = NoiseScale()
    >>> scale.add(small=5.0, big=2.0, units=4.0)  # |G|^2 = 1, tr(S) = 4
    >>> scale.noise().examples(unit=32)
    128.0
    """

    def __init__(self) -> None:
        self._variance = self._signal = self._weight = 0.0
        self._samples = 0

    def add(self, small: float, big: float, units: float) -> None:
        """Add one step: squared norms of one unit batch, and of the mean of `units` > 1."""
        variance = (small - big) / (1 - 1 / units)
        signal = (units * big - small) / (units - 1)
        if math.isfinite(variance) and math.isfinite(signal):
            self._variance = DECAY * self._variance + (1 - DECAY) * variance
            self._signal = DECAY * self._signal + (1 - DECAY) * signal
            self._weight = DECAY * self._weight + (1 - DECAY)
            self._samples += 1

    def noise(self, share: float = 1.0) -> Noise | None:
        if not self._samples:
            return None
        return Noise(self._variance / self._weight, self._signal / self._weight, self._samples, share)


Norms = tuple[Sequence[Tensor], float]  # norms of a bucket's ranges, and the factor from bucket to gradient


class NoiseMeter:
    """Meter of an exchange, on the tensors `exact`, whose mean is the true mean."""

    def __init__(self, exact: Layout, model: Layout, size: int) -> None:
        names = frozenset(exact.names)
        self._names, self._size = names, size
        self._share = exact.numel / max(1, model.numel)
        self._scale = NoiseScale()
        self._runs = PerLayout(lambda bucket: bucket.named(names).segments.merged)
        self._small: list[Norms] = []
        self._big: list[Norms] = []

    def due(self, step: int) -> bool:
        return self._size > 1 and bool(self._names) and step % EVERY == 0

    def begin(self) -> None:
        self._small.clear()
        self._big.clear()

    def local(self, grad: Tensor, layout: Layout, scale: float) -> None:
        self._small.append((norms(grad, self._runs(layout)), scale))

    def mean(self, mean: Tensor, layout: Layout, scale: float) -> None:
        self._big.append((norms(mean, self._runs(layout)), scale))

    def end(self) -> None:
        """Add the finished step. The host waits for a GPU only here."""
        read = iter(torch.stack(every).tolist() if (every := self._all_norms()) else ())
        small, big = (
            sum(scale**2 * sum(next(read) ** 2 for _ in norms) for norms, scale in some)
            for some in (self._small, self._big)
        )
        self._scale.add(small, big, self._size)

    def _all_norms(self) -> list[Tensor]:
        return [norm for some in (self._small, self._big) for norms, _ in some for norm in norms]

    @property
    def noise(self) -> Noise | None:
        return self._scale.noise(self._share)


def exactly_summed(method: Method, layout: Layout) -> Layout:
    """Return the tensors whose mean is exact, except for rounding to fp16."""
    parts = zip(method.routes, method.assign(layout), strict=True)
    exact: set[str] = set()
    for route, part in parts:
        if isinstance(route.reducer, Sum) and isinstance(route.feedback, NoFeedback):
            exact.update(part.names)
    return layout.named(exact)


def norms(x: Tensor, runs: Segments) -> Sequence[Tensor]:
    """Return the norms of these ranges of flat x, float32 () each, in one launch on a GPU.

    >>> norms(torch.tensor([3.0, 9.0, 4.0]), Segments((0, 2), (1, 1)))
    (tensor(3.), tensor(4.))
    """
    return tuple(torch._foreach_norm(runs.views(x))) if len(runs) else ()
