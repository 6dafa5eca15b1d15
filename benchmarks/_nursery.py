"""Where the ranks of a benchmark come from: benchmarks that run in turn share the process that imports for them."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_automodel.testing.pool import Nursery

_kept: list[Nursery] = []


@contextmanager
def shared_nursery() -> Iterator[Nursery]:
    """Fork ranks from a process of the block's own, or inside of another block of this kind from its process."""
    if _kept:
        yield _kept[0]
        return
    _kept.append(Nursery())
    try:
        yield _kept[0]
    finally:
        _kept.pop().close()
