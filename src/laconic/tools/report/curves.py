"""Curves for plots: a few hundred points, means over seeds with standard errors."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from laconic.tools.report.figure import MB
from laconic.tools.report.series import Array, MethodSeries

POINTS = 240
SMOOTHED = 50  # a point averages the last 50th of all steps
ROUNDING = 1e-6  # relative distance below which ranks differ by rounding


@dataclass(frozen=True)
class Curve:
    x: Array
    y: Array
    error: Array

    @property
    def low(self) -> Array:
        return self.y - self.error

    @property
    def high(self) -> Array:
        return self.y + self.error


def loss_by_step(method: MethodSeries) -> Curve:
    return _binned(method, np.arange(1, method.common + 1, dtype=np.float64))


def loss_by_megabyte(method: MethodSeries) -> Curve:
    curve = _binned(method, np.cumsum(method.over_seeds("network_sent").mean(axis=0)) / MB)
    sent = curve.x > 0
    return Curve(curve.x[sent], curve.y[sent], curve.error[sent])


def accuracy_by_step(method: MethodSeries) -> Curve:
    common = min(len(seed.eval_steps) for seed in method.seeds)
    values = np.stack([100 * seed.accuracy[:common] for seed in method.seeds])
    return Curve(method.seeds[0].eval_steps[:common], values.mean(axis=0), _error(values))


def consensus_by_step(method: MethodSeries) -> Curve | None:
    """Return ranks' distance from their average in percent, nan just after an averaging; None if equal."""
    common = min(len(seed.eval_steps) for seed in method.seeds)
    values = np.stack([seed.consensus[:common] for seed in method.seeds])
    apart = (values > ROUNDING).all(axis=0)
    if not apart.any():
        return None
    shown = np.where(apart, 100 * values, np.nan)
    return Curve(method.seeds[0].eval_steps[:common], shown.mean(axis=0), _error(shown))


def scale_by_step(method: MethodSeries) -> Curve | None:
    if not all(len(seed.loss_scale) == len(seed.steps) for seed in method.seeds):
        return None
    values = np.stack([seed.loss_scale[: method.common] for seed in method.seeds])
    edges = np.unique(np.linspace(0, values.shape[1] - 1, min(POINTS, values.shape[1])).astype(int))
    return Curve(edges + 1.0, values.mean(axis=0)[edges], _error(values)[edges])


def _binned(method: MethodSeries, x: Array) -> Curve:
    losses = trailing_mean(method.over_seeds("loss"), max(1, method.common // SMOOTHED))
    edges = np.unique(np.linspace(0, losses.shape[1], min(POINTS, losses.shape[1]) + 1).astype(int))
    means = np.stack([losses[:, start:end].mean(axis=1) for start, end in pairwise(edges)], axis=1)
    return Curve(x[edges[1:] - 1], means.mean(axis=0), _error(means))


def trailing_mean(values: Array, width: int) -> Array:
    """Return means over the last `width` columns, or fewer at the start; nan if one is not finite.

    >>> trailing_mean(np.array([[1.0, 3.0, 5.0]]), 2).tolist()
    [[1.0, 2.0, 4.0]]
    >>> trailing_mean(np.array([[np.inf, 3.0, 5.0, 7.0]]), 2).tolist()
    [[nan, nan, 4.0, 6.0]]
    """
    finite = np.isfinite(values)
    total, missing = (
        np.cumsum(np.pad(each, ((0, 0), (1, 0))), axis=1) for each in (np.where(finite, values, 0.0), ~finite)
    )
    ends = np.arange(1, values.shape[1] + 1)
    starts = np.maximum(0, ends - width)
    means: Array = (total[:, ends] - total[:, starts]) / (ends - starts)
    means[missing[:, ends] > missing[:, starts]] = np.nan
    return means


def _error(values: Array) -> Array:
    if len(values) < 2:
        return np.zeros(values.shape[1])
    spread: Array = values.std(axis=0, ddof=1) / np.sqrt(len(values))
    return spread
