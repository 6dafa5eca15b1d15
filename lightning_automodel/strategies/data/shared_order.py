"""Orders of users that all data ranks draw alike, of which each takes its share: samples, or whole batches."""

import contextlib
import inspect
import os
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from typing_extensions import override

from lightning_automodel._compat.lightning.trainer import remembers_arguments
from lightning_automodel.strategies.data.streams import FirstSamples

_OF_TRAINER = "_divides_for_the_trainer"


class FirstOfOrder(FirstSamples):
    """What a sampler, or a batch sampler, gives first in its present pass."""

    differs = (
        "read different orders (sample {number} of {stage}), but each takes its share of one order, so samples would "
        "come twice and others never. If the sampler shuffles, give it the same seed on all ranks. If it takes a part "
        "of its own on each rank, by strategy.data_rank of strategy.data_size, say so for all loaders: "
        "Trainer(use_distributed_sampler=False)"
    )


class _Noted:
    """Gives what ``source`` does, and notes the first of it."""

    def __init__(self, source: Any, first_samples: FirstSamples) -> None:
        self.source, self.first_samples = source, first_samples

    def __iter__(self) -> Iterator[Any]:
        return self.first_samples.noted(iter(self.source))

    def __len__(self) -> int:
        return len(self.source)


class SharedOrder(DistributedSamplerWrapper):
    """Shares the order of a sampler that may draw at random: all ranks draw the same, and each takes its part.

    What an epoch draws follows from its number, also where the sampler has a generator of its own: that one is brought
    to where it would be after the epochs before. What else a sampler keeps from pass to pass (a generator of numpy, a
    counter) is brought there in a run that resumes, by passes whose order nobody takes.
    """

    def __init__(self, sampler: Any, *args: Any, **kwargs: Any) -> None:
        self.first_samples = FirstOfOrder()
        noted: Any = _Noted(sampler, self.first_samples) if isinstance(sampler, Sized) else sampler
        super().__init__(noted, *args, **kwargs)
        generator = getattr(sampler, "generator", None)
        self.of_user = sampler
        self._generator = generator if isinstance(generator, torch.Generator) else None
        self._states = {} if self._generator is None else {0: self._generator.get_state()}  # by epochs that are through
        self._missed: list[int] = []  # epochs, which copies of this share

    @override
    def set_epoch(self, epoch: int) -> None:
        DistributedSampler.set_epoch(self, epoch)  # Lightning's own tells of_user from some version on
        if callable(of_user := getattr(self._told_epochs(), "set_epoch", None)):
            of_user(epoch)

    def _told_epochs(self) -> Any:
        """Return what Lightning tells the number of the epoch on one device."""
        return self.of_user

    def miss(self, epochs: Iterable[int]) -> None:
        """Takes note that another process has drawn these ``epochs``, the last ones before the next pass."""
        if self._generator is None and not callable(getattr(self._told_epochs(), "set_epoch", None)):
            self._missed[:] = epochs

    @override
    def __iter__(self) -> Iterator:
        with isolate_rng(include_cuda=False):
            while self._missed:
                self._seed(self._missed.pop(0))
                deque(self.of_user, maxlen=0)
            self._seed(self.epoch)
            if self._generator is None:
                return super().__iter__()
            self._go_to_epoch(self._generator)
            order = super().__iter__()
            self._states[self.epoch + 1] = self._generator.get_state()
            return order

    def _seed(self, epoch: int) -> None:
        seed = self.seed + epoch
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def _go_to_epoch(self, generator: torch.Generator) -> None:
        known = max(epoch for epoch in self._states if epoch <= self.epoch)
        generator.set_state(self._states[known])
        for _ in range(known, self.epoch):
            deque(self.of_user, maxlen=0)


class DealtBatches(SharedOrder):
    """Shares the batches of a batch sampler that no sampler of a data rank can be put into. Lightning tells a batch
    sampler's ``sampler``, if it has one, and nothing else of it, the number of the epoch.
    """

    @property
    def sampler(self) -> "DealtBatches":
        """Returns itself, to be told."""
        return self

    @override
    def _told_epochs(self) -> Any:
        return getattr(self.of_user, "sampler", None)


def share(
    kind: type[DistributedSampler], source: Any, *, equal: bool, num_replicas: int, rank: int, shuffle: bool = False
) -> Any:
    """Makes the share of a data rank of ``source``, of class ``kind``.

    Args:
        kind: divides ``source``.
        source: with a length.
        equal: all shares are equally long, unless ``source`` is shorter than there are shares.
        num_replicas: number of shares.
        rank: number of this share.
        shuffle: in an order that depends on ``seed_everything`` and the epoch.
    """
    settings: dict[str, Any] = {"num_replicas": num_replicas, "rank": rank, "shuffle": shuffle}
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
    sampler = kind(source, **settings, seed=seed, drop_last=equal and len(source) >= num_replicas)
    if not equal:
        assert isinstance(sampler.dataset, Sized)
        sampler.total_size = len(sampler.dataset)
        sampler.num_samples = len(range(rank, sampler.total_size, num_replicas))
    vars(sampler)[_OF_TRAINER] = True
    return sampler


def is_of_trainer(sampler: object) -> bool:
    """Tells whether :func:`share` has made ``sampler``, and not the user."""
    return hasattr(sampler, _OF_TRAINER)


def order_of(loader: DataLoader) -> SharedOrder | None:
    """Finds the order of the user's that the trainer shares out in ``loader``."""
    places = (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler)
    return next((place for place in places if isinstance(place, SharedOrder)), None)


def deal_batches(loader: DataLoader, *, equal: bool, num_replicas: int, rank: int) -> DealtBatches | None:
    """Makes the share of a data rank of the batches of ``loader``; ``None`` if a sampler says what is in them.

    Args:
        loader: with what divides one device's samples.
        equal: all shares are equally long.
        num_replicas: number of shares.
        rank: number of this share.
    """
    batches = loader.batch_sampler
    if batches is None or _is_around_sampler(batches) or not isinstance(batches, Sized):
        return None
    return share(DealtBatches, batches, equal=equal, num_replicas=num_replicas, rank=rank)


def _is_around_sampler(batches: Any) -> bool:
    """Tell whether the class of ``batches`` takes a sampler, and may be made anew with another one."""
    if not (isinstance(batches, BatchSampler) or (hasattr(batches, "batch_size") and hasattr(batches, "drop_last"))):
        return False
    signature = inspect.signature(type(batches))
    if any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values()):
        return True
    if not remembers_arguments(batches):
        with contextlib.suppress(TypeError):  # it needs more
            return "sampler" in signature.bind(sampler=None, batch_size=1, drop_last=False).arguments
        return False
    return "sampler" in signature.parameters
