"""Density of each layer, from the density of all weights.

Uniform: the same in every layer. ERK: density_l = eps * (sum of the weight's dimensions) / (their product),
with eps chosen for the total density; layers with density_l > 1 are dense. Evci et al. 2020,
arXiv:1911.11134, as in the authors' code. 2:4: half of every layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from laconic.core import arguments
from laconic.core.errors import SpecError

DensityLayout = Literal["uniform", "erk", "2:4"]
LAYOUTS: tuple[DensityLayout, ...] = ("uniform", "erk", "2:4")
Shapes = Mapping[str, tuple[int, ...]]


def densities(shapes: Shapes, density: float, layout: DensityLayout = "uniform") -> dict[str, float]:
    """Return the density of each weight, in (0, 1].

    Args:
        shapes: Shapes of the weights by name, with all kernel dimensions.
        density: Fraction of all entries to keep, in (0, 1].
        layout: "uniform", "erk" or "2:4", which needs density 0.5.

    >>> found = densities({"wide": (100, 100), "narrow": (10, 10)}, 0.1, "erk")
    >>> {name: round(share, 3) for name, share in found.items()}
    {'wide': 0.092, 'narrow': 0.918}
    """
    check_density(density, layout)
    return _erk(shapes, density) if layout == "erk" else dict.fromkeys(shapes, float(density))


def check_density(density: float, layout: DensityLayout) -> None:
    arguments.number("density", density, above=0, most=1)
    arguments.choice("layout", layout, LAYOUTS)
    if layout == "2:4" and density != 0.5:
        raise SpecError(f"density must be 0.5 with layout='2:4', got {density}")


def entries(density: float, n: int) -> int:
    """Return the number of entries kept of n: n - floor((1 - density) * n), as in the authors' code.

    >>> entries(0.5, 120), entries(0.2, 8), entries(0.9, 30)  # from the authors' tests
    (60, 2, 27)
    """
    return n - math.floor(round((1 - density) * n, 6))  # 1 - 0.9 is less than 0.1


def _erk(shapes: Shapes, density: float) -> dict[str, float]:
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / sizes[name] for name, shape in shapes.items()}
    budget, dense = density * sum(sizes.values()), set[str]()
    while len(dense) < len(shapes):
        left = budget - sum(sizes[name] for name in dense)
        eps = left / sum(raw[name] * sizes[name] for name in shapes if name not in dense)
        over = {name for name in shapes if name not in dense and eps * raw[name] > 1}
        if not over:
            return {name: 1.0 if name in dense else eps * raw[name] for name in shapes}
        dense |= {name for name in over if raw[name] == max(raw[each] for each in over)}
    return dict.fromkeys(shapes, 1.0)
