"""One stream for all data ranks: each reads all of it, takes every so-manyth sample, and asks whether it is one.

::

    rank 0 reads  a b c d e f ..  takes  a   c   e        a stream that takes its own part, or shuffles without a seed:
    rank 1 reads  a b c d e f ..  takes    b   d   f      rank 0 reads  a c e ..  rank 1 reads  b d f ..  is an error
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from lightning_automodel._compat.datasets import is_split_by_node
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.strategies.data.digests import digest, shown, who_agrees

FIRST = 16  # samples: buffers that shuffle differ in the first ones
_DECLARED = "sharded_by_data_rank"


class FirstSamples:
    """What the first worker of a loader reads first in its present pass, in memory that a rank shares with its workers.

    Attributes:
        passes: number of them so far [1].
        digests: of each sample, 64-bit; 0 where none was read yet.
        differs: says that ranks read something else.
    """

    differs = (
        "read different streams (sample {number} of {stage}), but each takes its share of one stream, so samples would "
        "come twice and others never. If the dataset reads a part of its own on each rank, by strategy.data_rank of "
        "strategy.data_size, say so: dataset.sharded_by_data_rank = True. If it shuffles, give it the same seed on all "
        "ranks. If its order is one, and only random augmentation differs: dataset.sharded_by_data_rank = False"
    )

    def __init__(self) -> None:
        self.passes = torch.zeros(1, dtype=torch.int64, device="cpu").share_memory_()
        self.digests = torch.zeros(FIRST, dtype=torch.int64, device="cpu").share_memory_()

    def noted(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield ``samples``, and note the first ones, unless another worker does, or a later pass has begun."""
        worker = get_worker_info()
        own = None
        if worker is None or worker.id == 0:
            self.digests.zero_()
            own = int(self.passes.add_(1))
        for number, sample in enumerate(samples):  # not ``yield from``: who stops would close an iterator of the user's
            if number < FIRST and own == int(self.passes):
                self.digests[number] = digest(sample) or 1
            yield sample


@dataclass(frozen=True)
class _Share:
    stream: IterableDataset
    rank: int
    size: int
    drop_last: bool
    seen: int
    first_samples: FirstSamples


class ShareOfStream(IterableDataset):
    """Every ``size``-th sample of an iterable dataset, from number ``rank`` on.

    Every rank reads the whole stream, which must be the same on all of them. A dataset that reads its own part only
    says so by an attribute ``sharded_by_data_rank = True``, and is left alone; so is what Hugging Face's
    ``split_dataset_by_node`` returns. With ``sharded_by_data_rank = False`` its samples may differ between ranks, for
    random augmentation; without the attribute that is an error.

    Attributes of the dataset are read and set through its share, for worker functions and states; it has but one of its
    own.

    Args:
        dataset: the stream; in a worker process, that worker's part of it.
        rank: number of this share.
        size: number of shares.
        drop_last: shares end together, so that no rank waits for another one's last batch.
        seen: samples at the beginning that are nobody's.
        first_samples: those of a share that this one replaces.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        rank: int,
        size: int,
        drop_last: bool,
        seen: int = 0,
        first_samples: FirstSamples | None = None,
    ) -> None:
        vars(self)["_share"] = _Share(dataset, rank, size, drop_last, seen, first_samples or FirstSamples())

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None and isinstance(self._share.stream, IterDataPipe):
            _divide_among_workers(self._share.stream, worker.num_workers, worker.id, worker.seed - worker.id)
        samples = iter(self._share.stream)
        for _ in range(self._share.seen):  # when the iteration begins, not with its first sample
            next(samples, None)
        return self._divided(samples)

    def _divided(self, samples: Iterator[Any]) -> Iterator[Any]:
        share, seen = self._share, 0
        for seen, sample in enumerate(share.first_samples.noted(samples), start=1):
            position = (seen - 1) % share.size
            if position == share.rank:
                mine = sample
            if position == share.size - 1:  # not earlier: the round may be incomplete
                yield mine
        if seen % share.size > share.rank and not share.drop_last:
            yield mine

    def __len__(self) -> int:
        share = self._share
        samples = max(len(share.stream) - share.seen, 0)
        return samples // share.size if share.drop_last else len(range(share.rank, samples, share.size))

    def __getattr__(self, name: str) -> Any:
        if name == "_share" or name.startswith("__"):  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._share.stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._share.stream, name, value)


def _divide_among_workers(pipe: IterDataPipe, workers: int, worker: int, seed: int) -> None:
    """Do what a ``DataLoader`` does for a datapipe, which it does not see in a share: all workers shuffle alike, and
    each takes its part behind a ``sharding_filter``.
    """
    apply_random_seed(pipe, torch.Generator().manual_seed(seed))
    apply_sharding(pipe, workers, worker)


def share_of_loader(loader: DataLoader, rank: int, size: int, drop_last: bool, seen: int = 0) -> DataLoader:
    """Makes a loader with the class and all attributes of ``loader``, over a share of its iterable dataset."""
    shared = copy.copy(loader)
    before = loader.dataset._share if isinstance(loader.dataset, ShareOfStream) else None
    stream = loader.dataset if before is None else before.stream
    assert isinstance(stream, IterableDataset)
    first_samples = None if before is None else before.first_samples
    dataset = ShareOfStream(stream, rank, size, drop_last, seen, first_samples)
    # DataLoader refuses a new dataset, since its samplers would be of the old one; streams have none.
    vars(shared).update(dataset=dataset, _iterator=None)
    return shared


def divides_itself(dataset: object) -> bool:
    """Tells whether an iterable dataset takes its own share, by ``sharded_by_data_rank`` or
    ``split_dataset_by_node``.
    """
    return bool(getattr(dataset, _DECLARED, False)) or is_split_by_node(dataset)


def compared_streams(loaders: Iterable[Any]) -> list[FirstSamples]:
    """Collects what was read of the streams, and of the orders of the user's, among ``loaders`` that are divided, and
    must be the same on all ranks.
    """
    return [found for loader in loaders if (found := _first_samples(loader)) is not None]


def _first_samples(loader: Any) -> FirstSamples | None:
    share = getattr(loader, "dataset", None)
    if isinstance(share, ShareOfStream):
        return share._share.first_samples if getattr(share, _DECLARED, None) is not False else None
    batches = getattr(loader, "batch_sampler", None)
    orders = (batches, getattr(batches, "sampler", None), getattr(loader, "sampler", None))
    found = (getattr(order, "first_samples", None) for order in orders)
    return next((each for each in found if isinstance(each, FirstSamples)), None)


def first_digest(loaders: Iterable[Any], have_ended: bool) -> int:
    """Compute one of the first samples of all streams among ``loaders``; 0 if there are none, or one gave nothing yet,
    or in later passes than the first, and -1 for a single one that has ended without any.
    """
    streams = compared_streams(loaders)
    if any(int(stream.passes) > 1 for stream in streams):
        return 0
    digests = [int(stream.digests[0]) for stream in streams]
    if have_ended and digests == [0]:
        return -1
    return digest(digests) if digests and all(digests) else 0


def check_streams(
    streams: list[FirstSamples], group: ProcessGroup, device: torch.device, stage: str, *, is_later: bool
) -> None:
    """Compares what the ranks of ``group`` have read in their present pass. Collective if there are any streams.

    Args:
        streams: as many on all ranks.
        group: the data ranks.
        device: that the group communicates on.
        stage: named in the error.
        is_later: they were the same in an earlier epoch. It warns: random augmentation ends no run in its middle.

    Raises:
        ValueError: on every rank of the group, with the global ranks that differ.
    """
    if not streams or group.size() == 1:
        return
    mine = torch.stack([torch.cat((stream.passes, stream.digests)) for stream in streams]).to(device)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group=group)
    for stream, (passes, *samples) in zip(streams, torch.stack(gathered).permute(1, 2, 0).tolist(), strict=True):
        texts = (unlike(digests, group, number, stage, stream) for number, digests in enumerate(samples))
        text = next(filter(None, texts), None) if len(set(passes)) == 1 else None
        if text is not None and not is_later:
            raise ValueError(text)
        if text is not None:
            warn_once(f"in a later pass {text}")


def unlike(
    digests: list[int], group: ProcessGroup, number: int, stage: str, read: FirstSamples | None = None
) -> str | None:
    """Say that ranks have read another sample of what was ``read`` than others; those that read none have 0."""
    if not all(digests) or len(set(digests)) == 1:
        return None
    differs = FirstSamples.differs if read is None else read.differs
    return f"{shown(who_agrees(digests, group))} {differs.format(number=number, stage=stage)}"
