"""Arrows between points on a circle, as SVG curves."""

from __future__ import annotations

from math import cos, hypot, pi, sin
from typing import NamedTuple

MIDDLE, CENTRE, RADIUS = 320.0, 352.0, 264.0
GAP = 16.0  # between discs; in smaller gaps arrows bend around
Point = tuple[float, float]


class Arc(NamedTuple):
    """Curve between ranks, with a `head` if messages go one way. `again`: earlier curves between them."""

    source: int
    to: int
    head: bool
    again: int


def place(rank: int, size: int) -> Point:
    angle = 2 * pi * rank / size - pi / 2
    return MIDDLE + RADIUS * cos(angle), CENTRE + RADIUS * sin(angle)


def bezier(arc: Arc, size: int, disc: float) -> tuple[Point, Point, Point]:
    """Return start, control point and end of an arc between edges of discs of radius `disc`.

    Arcs bend towards the centre, repeated ones more; a diameter bends right.
    """
    a, b = place(arc.source, size), place(arc.to, size)
    across, down = b[0] - a[0], b[1] - a[1]
    length = hypot(across, down)
    middle = ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2)
    inward = (MIDDLE - middle[0], CENTRE - middle[1])
    depth = hypot(*inward)
    bow = length * (0.06 * arc.head + 0.07 * arc.again)
    if (arc.to - arc.source) % size not in (1, size - 1):
        bow = max(bow, 1.9 * disc - (RADIUS - depth))
    elif bow and length - 2 * disc < GAP:
        bow = 1.1 * disc
    if depth < 1:
        inward, depth = (-down, across), length
    bend = (middle[0] + 2 * bow * inward[0] / depth, middle[1] + 2 * bow * inward[1] / depth)
    return toward(a, bend, disc + 1), bend, toward(b, bend, disc + (2.5 if arc.head else 1))


def arrowhead(bend: Point, end: Point, length: float) -> str:
    back = toward(end, bend, length)
    across, down = 0.42 * (end[0] - back[0]), 0.42 * (end[1] - back[1])
    return f"M{xy(end)}L{xy((back[0] - down, back[1] + across))}L{xy((back[0] + down, back[1] - across))}Z"


def toward(here: Point, there: Point, distance: float) -> Point:
    """Return the point at this distance from `here` towards `there`.

    >>> toward((0.0, 0.0), (3.0, 4.0), 10)
    (6.0, 8.0)
    """
    across, down = there[0] - here[0], there[1] - here[1]
    length = hypot(across, down) or 1.0
    return here[0] + distance * across / length, here[1] + distance * down / length


def xy(point: Point) -> str:
    return f"{point[0]:.1f} {point[1]:.1f}"
