"""One stream for all data ranks: each reads all of it, and takes every so-manyth sample."""

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_automodel._compat.datasets import is_split_by_node


class ShareOfStream(IterableDataset):
    """Every ``size``-th sample of an iterable dataset, from number ``rank`` on.

    Every rank reads the whole stream, which must be the same on all of them. A dataset that reads its own part only
    says so by an attribute ``sharded_by_data_rank = True``, and is left alone; so is what Hugging Face's
    ``split_dataset_by_node`` returns.

    Attributes of the dataset are read and set through its share, for worker functions and states.

    Args:
        dataset: the stream; in a worker process, that worker's part of it.
        rank: number of this share.
        size: number of shares.
        drop_last: shares end together, so that no rank waits for another one's last batch.
        seen: samples at the beginning that are nobody's.
    """

    def __init__(self, dataset: IterableDataset, rank: int, size: int, drop_last: bool, seen: int = 0) -> None:
        vars(self).update(dataset=dataset, rank=rank, size=size, drop_last=drop_last, seen=seen)

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.dataset)
        for _ in range(self.seen):  # when the iteration begins, not with its first sample
            next(samples, None)
        return self._divided(samples)

    def _divided(self, samples: Iterator[Any]) -> Iterator[Any]:
        seen = 0
        for seen, sample in enumerate(samples, start=1):
            position = (seen - 1) % self.size
            if position == self.rank:
                mine = sample
            if position == self.size - 1:  # not earlier: the round may be incomplete
                yield mine
        if seen % self.size > self.rank and not self.drop_last:
            yield mine

    def __len__(self) -> int:
        samples = max(len(self.dataset) - self.seen, 0)
        return samples // self.size if self.drop_last else len(range(self.rank, samples, self.size))

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)


def share_of_loader(loader: DataLoader, rank: int, size: int, drop_last: bool, seen: int = 0) -> DataLoader:
    """Makes a loader with the class and all attributes of ``loader``, over a share of its iterable dataset."""
    shared = copy.copy(loader)
    stream = loader.dataset.dataset if isinstance(loader.dataset, ShareOfStream) else loader.dataset
    assert isinstance(stream, IterableDataset)
    dataset = ShareOfStream(stream, rank, size, drop_last, seen)
    # DataLoader refuses a new dataset, since its samplers would be of the old one; streams have none.
    vars(shared).update(dataset=dataset, _iterator=None)
    return shared


def divides_itself(dataset: object) -> bool:
    """Tells whether an iterable dataset takes its own share, by ``sharded_by_data_rank`` or
    ``split_dataset_by_node``.
    """
    return bool(getattr(dataset, "sharded_by_data_rank", False)) or is_split_by_node(dataset)
