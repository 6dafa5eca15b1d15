"""Tables that a reader sorts by a click on a heading, or by the page's address: ``#sort=TABLE:HEADING:down``."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """What a field of a table shows, and where it stands in the order.

    Attributes:
        text: as shown.
        order: number to sort by; ``None``: by the text, and where a number is missing, at the end.
    """

    text: str
    order: float | None = None


@dataclass(frozen=True)
class Table:
    """A table with a heading for each column.

    Attributes:
        name: in addresses: letters.
        columns: headings.
        rows: a cell, or its text, for each column.
        numbers: headings of columns whose cells are numbers.
        quiet: rows, by their index, that are shown faintly.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    numbers: frozenset[str] = frozenset()
    quiet: frozenset[int] = field(default_factory=frozenset)

    @property
    def cells(self) -> list[list[Cell]]:
        """Return the rows, with texts as cells."""
        return [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]
