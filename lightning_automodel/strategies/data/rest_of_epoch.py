"""The rest of an epoch: loaders whose first pass goes on with one that has begun in an earlier process."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, DistributedSampler


def resumed(loader: DataLoader, rest: Iterable | None = None, through: int = 0) -> DataLoader:
    """Returns a loader with the class and all attributes of ``loader``, whose first pass is that of ``rest``.

    It stands for one that had begun when the checkpoint was saved, and drew then what a pass draws when it begins.

    Args:
        loader: of whole epochs.
        rest: what is left of the first one; ``None``: all of it.
        through: batches of that which are not.
    """
    result = with_class(copy.copy(loader), _Resumed)
    vars(result).update(_has_begun=True, _rest=rest, _through=through, _iterator=None)
    return result


def with_class(loader: DataLoader, base: type) -> DataLoader:
    """Return ``loader`` with what ``base`` has before its class, whose name it keeps."""
    kind = type(loader)
    names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__}
    loader.__class__ = type(kind.__name__, (base, kind), names)
    return loader


def counts_batches(loader: object) -> bool:
    """Tells whether the state of ``loader`` is a number of batches."""
    return getattr(loader, "counts_batches", False)


@contextmanager
def _left_as_it_is(generator: torch.Generator | None) -> Iterator[None]:
    state = None if generator is None else generator.get_state()
    yield
    if generator is not None and state is not None:
        generator.set_state(state)


class _Resumed(DataLoader):
    _has_begun = False
    _rest: Iterable | None = None
    _through = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        has_begun, rest = self._has_begun, self._rest
        self._has_begun, self._rest = False, None
        if not has_begun:
            return super().__iter__()
        # What a pass draws when it begins, this epoch has drawn.
        with isolate_rng(include_cuda=False), _left_as_it_is(self.generator):
            if rest is None:
                return super().__iter__()
            batches = iter(rest)
        return self.counted(batches, self._through) if counts_batches(self) else batches  # type: ignore[attr-defined]


class Behind:
    """What an iterable gives after its first ``count`` items, which are taken when the iteration begins."""

    def __init__(self, items: Any, count: int) -> None:
        self.items = items
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.items)
        for _ in range(self.count):
            next(iterator, None)
        return iterator

    def __len__(self) -> int:
        return max(len(self.items) - self.count, 0)


class RestOfOrder:
    """The share of a data rank of what is left of an epoch's order.

    Args:
        sampler: of whole epochs, set to the epoch.
        seen: samples of all data ranks that are through.
    """

    def __init__(self, sampler: DistributedSampler, seen: int) -> None:
        whole = copy.copy(sampler)
        size = len(whole.dataset)  # type: ignore[arg-type]
        vars(whole).update(num_replicas=1, rank=0, drop_last=False, num_samples=size, total_size=size)
        self.whole, self.seen, self.rank, self.replicas = whole, seen, sampler.rank, sampler.num_replicas

    def __iter__(self) -> Iterator[int]:
        order = list(self.whole)[self.seen :]
        return iter(order[self.rank : len(self) * self.replicas : self.replicas])

    def __len__(self) -> int:
        return max(self.whole.total_size - self.seen, 0) // self.replicas
