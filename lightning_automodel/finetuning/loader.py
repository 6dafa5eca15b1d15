"""A data loader that resumes in the middle of an epoch, and an order of rows that depends on the epoch only."""

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler


class EpochShuffle(RandomSampler):
    """A new order each epoch, the same in every run with the same ``seed_everything``.

    torch's own draws from the global generator, whose state depends on all that ran before. Lightning calls
    ``set_epoch``, and puts a distributed sampler with the same property in its place where there are several ranks.
    """

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) + self.epoch
        generator = torch.Generator().manual_seed(seed)
        yield from torch.randperm(len(self), generator=generator).tolist()


class ResumableLoader(DataLoader):
    """Knows how many batches of the epoch are through, and after a resume goes on behind them.

    Lightning saves and restores the state of a loader that has ``state_dict`` and ``load_state_dict``. A count does not
    say what a batch was: a strategy that does goes on behind the samples, also with other sizes (``counts_batches``).
    """

    counts_batches = True
    _done = 0
    _skip = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skip, self._skip = self._skip, 0
        self._done = skip
        with torch.random.fork_rng(devices=[], enabled=skip > 0):  # what this epoch has drawn already
            batches = super().__iter__()
            for _ in islice(batches, skip):
                pass
        yield from self.counted(batches, skip)

    def counted(self, batches: Iterator[Any], done: int) -> Iterator[Any]:
        """Hand out ``batches``, of an epoch of which ``done`` are through."""
        self._done = done
        for batch in batches:
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Count the batches of the running epoch that were handed out; 0 when it is over."""
        return {"batches": (self._skip or self._done) % max(len(self), 1)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Skips, in the next pass, the batches that ``state`` counts."""
        self._skip = state["batches"]
