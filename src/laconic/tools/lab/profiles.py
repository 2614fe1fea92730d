"""Networks by name, with round figures of common networks.

In `wan-3-regions`, hosts are in three regions in turn, an ocean or half the world apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from laconic.core.arguments import shown
from laconic.core.errors import SpecError
from laconic.tools.lab.link import Link


@dataclass(frozen=True)
class Profile:
    """Every host's link. `between_s[a][b]`: additional seconds from region a to b, one way."""

    link: Link
    between_s: tuple[tuple[float, ...], ...] = ((0.0,),)

    def extra_s(self, source: int, target: int) -> float:
        regions = len(self.between_s)
        return self.between_s[source % regions][target % regions]

    @property
    def direct(self) -> bool:
        return not any(map(any, self.between_s))


PROFILES = {
    "ethernet-1g": Profile(Link("1gbit")),
    "ethernet-100m": Profile(Link("100mbit")),
    "wifi": Profile(Link("80mbit", delay="2ms", jitter="1.5ms", loss="0.1%")),
    "wan-3-regions": Profile(
        Link("200mbit", delay="0.5ms", jitter="0.5ms", loss="0.01%"),
        between_s=((0.0, 0.035, 0.08), (0.035, 0.0, 0.11), (0.08, 0.11, 0.0)),
    ),
    "dsl": Profile(Link(up="10mbit", down="50mbit", delay="10ms", jitter="2ms")),
}


def profile(name: str) -> Profile:
    """Return the profile of this name.

    >>> profile("ethernet-1g").link
    Link(rate='1gbit', delay='0ms', jitter='0ms', loss='0%', up=None, down=None)
    """
    if name not in PROFILES:
        *first, last = PROFILES
        raise SpecError(f"there is no profile {shown(name)}; there are {', '.join(first)} and {last}")
    return PROFILES[name]
