"""Lines over steps or tokens, as the numbers of an SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 10, 26
_MOST_POINTS = 800
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Line:
    """The values of one run.

    Attributes:
        name: as the legend has it.
        slot: its colour, from 1.
        points: x and y, in the order of x.
    """

    name: str
    slot: int
    points: Points


@dataclass(frozen=True)
class Chart:
    """The same number of several runs.

    Attributes:
        title: what is shown.
        over: what x is, such as "steps".
        lines: of the runs that have it.
        x_range: the first and the last x of the picture.
    """

    title: str
    over: str
    lines: Sequence[Line]
    x_range: tuple[float, float]

    @cached_property
    def _finite(self) -> list[tuple[Line, Points]]:
        return [(line, [p for p in line.points if math.isfinite(p[1])]) for line in self.lines]

    @cached_property
    def y_range(self) -> tuple[float, float]:
        """Return the lowest and the highest y, with room."""
        values = [y for _, points in self._finite for _, y in points]
        low, high = min(values, default=0.0), max(values, default=1.0)
        if low == high:  # in the middle
            low, high = low - (abs(low) / 2 or 1.0), high + (abs(high) / 2 or 1.0)
        room = 0.05 * (high - low)
        return (low - room if low < 0 or low > room else 0.0), high + room

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Place a point in the picture."""
        (x0, x1), (y0, y1) = self.x_range, self.y_range
        return (
            LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM),
        )

    @property
    def paths(self) -> list[tuple[Line, list[tuple[float, float]]]]:
        """Return the places of the points of each line, thinned to what a picture shows."""
        return [(line, [self.at(*point) for point in thin(points)]) for line, points in self._finite]

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        """Return the places and texts of marks at the bottom."""
        return [(self.at(x, 0)[0], short(x)) for x in ticks(*self.x_range, 5)]

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        """Return the places and texts of marks at the left."""
        return [(self.at(0, y)[1], short(y)) for y in ticks(*self.y_range, 5)]


def thin(points: Points) -> Points:
    """Keep the lowest and the highest of neighbours, where there are more points than a picture shows."""
    width = -(-len(points) // (_MOST_POINTS // 2))
    if width <= 2:
        return points
    found: list[tuple[float, float]] = []
    for begin in range(0, len(points), width):
        some = points[begin : begin + width]
        found += sorted({min(some, key=lambda p: p[1]), max(some, key=lambda p: p[1])})
    return found


def ticks(low: float, high: float, most: int) -> list[float]:
    """List round numbers between ``low`` and ``high``, about ``most`` of them."""
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def short(number: float) -> str:
    """Write a number with at most four digits."""
    for unit, letter in _UNITS:
        if abs(number) >= unit:
            return f"{number / unit:.4g}{letter}"
    return f"{number:.4g}"
