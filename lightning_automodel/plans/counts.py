"""Numbers that the ranks of a tensor-parallel group must divide among them: heads, rows of packed matrices."""

from collections.abc import Iterable
from dataclasses import dataclass

MOST_LISTED = 4


@dataclass(frozen=True)
class Count:
    """A number that the ranks must divide among them evenly, such as heads.

    Attributes:
        what: where it stands.
        parts: how many there are.
        shared: with more ranks than parts, several ranks may use one (key/value heads).
    """

    what: str
    parts: int
    shared: bool = False

    def allows(self, tp: int) -> bool:
        """Tells whether every rank gets as much as the others."""
        return self.parts % tp == 0 or (self.shared and tp % self.parts == 0)


def check_counts(model: str, tp: int, counts: Iterable[Count]) -> None:
    """Check that ``tp`` fits all of ``counts``.

    Raises:
        ValueError: naming ``model``, the counts that ``tp`` does not divide, and the sizes that fit.
    """
    counts = list(dict.fromkeys(counts))
    wrong = [count for count in counts if not count.allows(tp)]
    if wrong:
        shared = ", or be a multiple of key/value heads" if any(count.shared for count in wrong) else ""
        raise ValueError(
            f"tp={tp} does not fit {model} with {listed(wrong)}: tp must divide them{shared}; "
            f"use one of {', '.join(map(str, fitting_sizes(counts)))}"
        )


def listed(counts: Iterable[Count]) -> str:
    """Write counts with their names, the first few of them."""
    texts = [f"{count.what}={count.parts}" for count in counts]
    more = f" and {len(texts) - MOST_LISTED} more" if len(texts) > MOST_LISTED else ""
    return " and ".join(texts[:MOST_LISTED]) + more


def fitting_sizes(counts: Iterable[Count]) -> list[int]:
    """List the numbers of ranks that fit all of ``counts``."""
    counts = set(counts)
    largest = max(count.parts for count in counts)
    return [tp for tp in range(1, largest + 1) if all(count.allows(tp) for count in counts)]
