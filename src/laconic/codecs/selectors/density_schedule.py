"""DensitySchedule: another selector with a schedule of densities, for warm-ups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, cast

from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.layout import Segments
from laconic.core.selector import Selector, check_density
from laconic.core.spec import Status


@dataclass(frozen=True, repr=False)
class DensitySchedule(Selector):
    """`final` with density densities[step // every] during the schedule, then with its own density.

    DGC's warm-up (Lin et al. 2018, arXiv:1712.01887). Without `at`, it chooses as `final` does.

    >>> from laconic.core.spec import parse
    >>> ramp = parse("density_schedule(topk(density=0.001), densities=(0.25, 0.0625), every=100)")
    >>> ramp.at(99), ramp.at(100), ramp.at(200)
    (topk(density=0.25), topk(density=0.0625), topk(density=0.001))
    """

    status: ClassVar[Status] = "own"

    final: Selector
    densities: tuple[float, ...]
    every: int

    examples: ClassVar[tuple[str, ...]] = (
        "density_schedule(topk(density=0.01), densities=(0.25, 0.0625), every=100)",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.final, Selector) or not has_density(self.final):
            raise SpecError(
                "density_schedule takes a selector with a density, such as topk(density=0.01), got"
                f" {self.final!r}"
            )
        if not isinstance(self.densities, (tuple, list)) or not self.densities:
            raise SpecError(
                "density_schedule takes its densities as a list, such as (0.25, 0.0625), got"
                f" {self.densities!r}"
            )
        for density in self.densities:
            check_density(density)
        arguments.whole("density_schedule: every", self.every, 1)
        object.__setattr__(self, "densities", tuple(self.densities))

    @cached_property
    def stages(self) -> tuple[Selector, ...]:
        return tuple(with_density(self.final, density) for density in self.densities)

    @property
    def replayable(self) -> bool:  # type: ignore[override]
        return self.final.replayable

    @property
    def warm_at(self) -> int:
        return max(self.every * len(self.densities), self.final.warm_at)

    def at(self, step: int) -> Selector:
        stage = step // self.every
        return self.stages[stage] if 0 <= stage < len(self.stages) else self.final.at(step)

    def select_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.final.select_segments(x, segments, keys)

    def max_count(self, n: int) -> int:
        return max(each.max_count(n) for each in (self.final, *self.stages))

    def omega(self, n: int) -> float:
        return max(each.omega(n) for each in (self.final, *self.stages))


def has_density(selector: Selector) -> bool:
    return "density" in {field.name for field in fields(cast(Any, selector))}


def with_density(selector: Selector, density: float) -> Selector:
    return cast(Selector, replace(cast(Any, selector), density=density))
