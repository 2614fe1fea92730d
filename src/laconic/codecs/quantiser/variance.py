"""Bounds of random rounding: omega of levels on a grid, E|C(x) - x|^2 <= omega |x|^2.

An element u = |x_i| / z between two levels lo, hi has variance (u - lo) (hi - u). Over all x of n elements in
one block (each |u| <= 1), with s levels:

  uniform, max  One |u| is 1 and exact. The rest lose most in the lowest cell, and all at one u, where with
                a = (n - 1) / s^2, f = u s: a f (1 - f) / (1 + a f^2). At its peak f = 1 / (1 + sqrt(1 + a))
                it is (sqrt(1 + a) - 1) / 2.
  uniform, l2   The squares of u add up to 1. f (1 - f) <= g(q), q = (s u)^2, with g = sqrt(q) - q up to
                q = 1/4 and 1/4 beyond: concave, so the loss is at most n g(s^2 / n) / s^2: sqrt(n) / s - 1
                for sqrt(n) >= 2 s, else n / (4 s^2). (Alistarh et al. 2017: min(n / s^2, sqrt(n) / s).)
  powers        Between two powers of 2 the loss is at most u^2 / 8; below the least, t = 2^(1 - s), that of
                a uniform grid of 1 / t levels.
  powers, max   So the larger of 1/8 and (sqrt(1 + (n - 1) t^2) - 1) / 2.
  powers, l2    With a price b >= 1/8 on u^2, an element loses at most t^2 / (4 (1 + b)) beyond its price:
                omega <= b + n t^2 / (4 (1 + b)), least at t sqrt(n) - 1 for t sqrt(n) >= 9/4, else at b =
                1/8: 1/8 + 2/9 n t^2.

Each bound grows with n: that of the longest block holds for all.
"""

from __future__ import annotations

import math

ROUNDING = 1 + 1e-6  # float32 rounding


def uniform(n: int, levels: int, norm: str) -> float:
    """Return omega for levels 0, 1/s, ..., 1 of the norm of n elements."""
    if n <= 1:
        return 0.0
    if norm == "max":
        return (math.sqrt(1 + (n - 1) / levels**2) - 1) / 2 * ROUNDING
    root = math.sqrt(n) / levels
    return (root - 1 if root >= 2 else root**2 / 4) * ROUNDING


def powers(n: int, levels: int, norm: str) -> float:
    """Return omega for levels 0, 2^(1 - s), ..., 1/2, 1 of the norm of n elements."""
    if n <= 1 or levels == 1:
        return uniform(n, 1, norm)
    least = 2.0 ** (1 - levels)
    if norm == "max":
        return max(0.125, (math.sqrt(1 + (n - 1) * least**2) - 1) / 2) * ROUNDING
    root = least * math.sqrt(n)
    return (root - 1 if root >= 2.25 else 0.125 + 2 / 9 * root**2) * ROUNDING


def clipped(n: int, clip: float) -> float:
    """Return omega for one level that clips at `clip` standard deviations of n elements, or r if larger.

    With r the root mean square, the scale is t r, t <= max(clip, 1). In units of r, a = |x_i| loses a (t - a)
    below t and (a - t)^2 < a^2 beyond. The most is with nearly all at one a, and the rest losing all: t a -
    a^2 + 1 - a^2, at its peak a = t / 4 <= 1: 1 + t^2 / 8; for t > 4 all are at a = 1: t - 1.
    """
    if n <= 1:
        return 0.0
    t = min(max(clip, 1.0), math.sqrt(n))  # a scale is at most the largest |x|, at most r sqrt(n)
    return (1 + t**2 / 8 if t <= 4 else t - 1) * ROUNDING
