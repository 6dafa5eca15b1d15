"""Orders of users that all data ranks draw alike, of which each takes its share: samples, or whole batches."""

import contextlib
import inspect
import os
import random
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from typing_extensions import override

from lightning_automodel._compat.lightning.trainer import remembers_arguments
from lightning_automodel.strategies.data.streams import FirstSamples

_OF_TRAINER = "_divides_for_the_trainer"
_PASSES = "_passes_of_lightning_automodel"


class FirstOfOrder(FirstSamples):
    """What a sampler, or a batch sampler, gives first in its present pass."""

    differs = (
        "read different orders (sample {number} of {stage}), but each takes its share of one order, so samples would "
        "come twice and others never. If the sampler shuffles, give it the same seed on all ranks. If it takes a part "
        "of its own on each rank, by strategy.data_rank of strategy.data_size, say so for all loaders: "
        "Trainer(use_distributed_sampler=False)"
    )


@dataclass
class _Present:
    """The present pass of a share.

    Attributes:
        number: among those of the sampler; ``None`` before the first.
        states: of the generators that the sampler holds, when the pass was begun, and when it was read.
        kept: it, if a run that resumes has made it and the loader has not begun it yet.
    """

    number: int | None = None
    states: list[list[Tensor]] = field(default_factory=list)
    kept: list[tuple[list[Any], Iterator]] = field(default_factory=list)


class SharedOrder(DistributedSamplerWrapper):
    """Shares the order of a sampler that may draw at random: all ranks draw the same, and each takes its part.

    A pass is one of the sampler's, begun and read where one device would: what that keeps from pass to pass (a
    generator, a counter) goes on, also where its loader is made anew. What it draws from torch, numpy and ``random``
    themselves follows from the epoch.

    Attributes:
        of_user: the sampler.
        passes: of it so far, in whatever share: the epoch that the share was told, and whether the order was read.
        present: which of them is this share's, also of its copies.
    """

    def __init__(self, sampler: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sampler, *args, **kwargs)
        self.first_samples = FirstOfOrder()
        self.of_user = sampler
        self.passes: list[list[Any]] = []
        self.present = _Present()
        if hasattr(sampler, "__dict__"):
            self.passes = vars(sampler).setdefault(_PASSES, self.passes)

    @override
    def set_epoch(self, epoch: int) -> None:
        DistributedSampler.set_epoch(self, epoch)  # Lightning's own tells of_user from some version on
        if callable(of_user := getattr(self._told_epochs(), "set_epoch", None)):
            of_user(epoch)

    def _told_epochs(self) -> Any:
        """Return what Lightning tells the number of the epoch on one device."""
        return self.of_user

    def describe(self) -> dict[str, Any]:
        """Describe the passes for a checkpoint: all of the sampler, and the present one of this share."""
        return {
            "passes": [list(begun) for begun in self.passes],
            "present": self.present.number,
            "states": self.present.states,
            "now": self.generator_states(),
        }

    def go_on_in(self, epoch: int, is_read: bool, states: list[list[Tensor]]) -> None:
        """Makes a pass that another process has begun, for the loader to go on with.

        Args:
            epoch: that it is of.
            is_read: there.
            states: of generators, as :meth:`describe` has them.
        """
        self._set_states(states[:1])
        begun, items = self.begin(epoch)
        if is_read:
            self._set_states(states[1:])
            items = iter(self.read(begun, items))
        self.present.kept = [(begun, items)]

    @property
    def is_told(self) -> bool:
        """Tell whether the sampler says by itself what its order is in an epoch."""
        return callable(getattr(self._told_epochs(), "set_epoch", None))

    def generators(self) -> list[torch.Generator]:
        """Find the generators of torch that the sampler holds, or the one that it makes batches of."""
        holders = (self.of_user, getattr(self.of_user, "sampler", None))
        held = (value for holder in holders for value in getattr(holder, "__dict__", {}).values())
        return [value for value in held if isinstance(value, torch.Generator)]

    def generator_states(self) -> list[Tensor]:
        """Read the states of its generators."""
        return [generator.get_state() for generator in self.generators()]

    def _set_states(self, states: list[list[Tensor]]) -> None:
        for each in states:
            for generator, state in zip(self.generators(), each, strict=False):
                generator.set_state(state)

    @override
    def __iter__(self) -> Iterator:
        begun, items = self.present.kept.pop() if self.present.kept else self.begin(self.epoch)
        return self._part(begun, self.first_samples.noted(items))

    def _part(self, begun: list[Any], items: Iterator) -> Iterator:
        order = self.read(begun, items)
        for index in DistributedSampler.__iter__(self):
            yield order[index]

    def begin(self, epoch: int) -> tuple[list[Any], Iterator]:
        """Begins a pass of the sampler."""
        begun = [epoch, False]
        self.present.number, self.present.states = len(self.passes), [self.generator_states()]
        self.passes.append(begun)
        with isolate_rng(include_cuda=False):
            self._seed(epoch)
            return begun, iter(self.of_user)

    def read(self, begun: list[Any], items: Iterator) -> list[Any]:
        """Reads a pass that was begun."""
        if not begun[1]:
            self.present.states.append(self.generator_states())
        begun[1] = True
        with isolate_rng(include_cuda=False):
            self._seed(begun[0])
            return list(items)

    def _seed(self, epoch: int) -> None:
        seed = self.seed + epoch
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)


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


def order_of(loader: object) -> SharedOrder | None:
    """Finds the order of the user's that the trainer shares out in ``loader``, if it does."""
    batches = getattr(loader, "batch_sampler", None)
    places = (batches, getattr(batches, "sampler", None), getattr(loader, "sampler", None))
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
