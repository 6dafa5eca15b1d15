"""Loops over blocks of rows that all do the same: all run, or, where a step is only planned, some stand for all."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

Rounds = Callable[[Sequence[slice]], Iterable[slice]]

_chosen: list[Rounds] = []


def rounds(blocks: Sequence[slice]) -> Iterable[slice]:
    """Go through ``blocks``, or through those that :func:`going_through` says."""
    return _chosen[-1](blocks) if _chosen else blocks


@contextmanager
def going_through(choose: Rounds) -> Iterator[None]:
    """Go through the blocks that ``choose`` takes of all, within this context: for steps without values."""
    _chosen.append(choose)
    try:
        yield
    finally:
        _chosen.pop()
