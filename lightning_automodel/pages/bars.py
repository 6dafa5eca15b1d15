"""Stacked bars, one below the other, on one scale."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """A part of a bar.

    Attributes:
        name: of the part, as the legend has it.
        slot: its colour, from 1.
        size: in the unit of the bars.
        text: the size in words.
    """

    name: str
    slot: int
    size: float
    text: str


@dataclass(frozen=True)
class Bar:
    """Parts side by side.

    Attributes:
        name: of the bar.
        segments: from left to right.
        text: the whole in words.
    """

    name: str
    segments: Sequence[Segment]
    text: str

    @property
    def size(self) -> float:
        """Add the parts."""
        return sum(segment.size for segment in self.segments)


@dataclass(frozen=True)
class Bars:
    """Bars over a common limit.

    Attributes:
        bars: from top to bottom.
        limit: in the unit of the bars.
        limit_text: the limit in words.
    """

    bars: Sequence[Bar]
    limit: float
    limit_text: str

    @property
    def scale(self) -> float:
        """Return the size of the full width: that of the limit, unless bars would be too short to see."""
        longest = max((bar.size for bar in self.bars), default=0.0)
        return max(longest, self.limit if longest > self.limit / 4 else 0.0) * 1.02 or 1.0

    @property
    def shows_limit(self) -> bool:
        """Tell whether the limit lies within the full width."""
        return self.limit <= self.scale

    @property
    def legend(self) -> list[Segment]:
        """List the parts that occur, by their colour."""
        found = {s.slot: s for bar in self.bars for s in bar.segments if s.size}
        return [found[slot] for slot in sorted(found)]
