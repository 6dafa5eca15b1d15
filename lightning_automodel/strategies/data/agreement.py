"""Compares the first batches of each stage over the ranks of tp and cp, which compute one model together, and what the
data ranks read first of the streams that they share.
"""

import weakref
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_automodel._compat.lightning.progress import training_loader
from lightning_automodel.strategies.data.digests import digest, shown, who_agrees
from lightning_automodel.strategies.data.streams import FirstSamples, check_streams, compared_streams

COMPARED = 3  # batches per stage: enough for a wrong sampler or seed to show, too few to cost time
LATER = frozenset(10**power for power in range(1, 10))  # batches: streams part ways behind a buffer that shuffles


class Agreement:
    """Counts the batches of each stage, and compares the first ones and fewer and fewer of those that follow.

    Streams of evaluation are compared by the protocol that keeps it even, which knows who has a batch.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._streams: list[FirstSamples] = []
        self._epochs = (0, 0)  # in which streams were first and last compared
        self._loader: weakref.ref[Any] | None = None  # what is loaded anew goes

    def start(self, trainer: "pl.Trainer") -> None:
        """Begins the trainer's present stage, whose first batches are to be compared."""
        self._seen[_stage(trainer)] = 0
        if trainer.training:
            loader = training_loader(trainer)
            self._streams = [] if loader is None else compared_streams(loader.flattened)
            self._epochs = trainer.current_epoch, trainer.current_epoch
            self._loader = None if loader is None else weakref.ref(loader)

    def check(
        self, batch: Any, trainer: "pl.Trainer", samples: ProcessGroup, data: ProcessGroup, device: torch.device
    ) -> None:
        """Compares ``batch``, and streams, if it is its turn. Collective over both groups then.

        Args:
            batch: any nest of containers, tensors, arrays, numbers and strings.
            trainer: in the stage that the batch is of.
            samples: the ranks that must have the same batch.
            data: those that share streams.
            device: that the groups communicate on.

        Raises:
            ValueError: on every rank of a group, with the global ranks that differ.
        """
        if self._loader is not None and trainer.training and training_loader(trainer) is not self._loader():
            self.start(trainer)  # loaded anew, for a later epoch
        stage = _stage(trainer)
        number = self._seen.get(stage, 0)
        self._seen[stage] = number + 1
        is_due = number < COMPARED or number in LATER
        if is_due and samples.size() > 1:
            mine = torch.tensor(digest(batch), device=device)
            gathered = [torch.empty_like(mine) for _ in range(samples.size())]
            dist.all_gather(gathered, mine, group=samples)
            parties = who_agrees([int(value) for value in gathered], samples)
            if len(parties) > 1:
                raise ValueError(_disagreement(parties, number, stage))
        first, last = self._epochs
        if trainer.training and (is_due or trainer.current_epoch != last):
            self._epochs = first, trainer.current_epoch
            check_streams(self._streams, data, device, stage, is_later=trainer.current_epoch != first)


def _stage(trainer: "pl.Trainer") -> str:
    assert trainer.state.stage is not None
    return trainer.state.stage.value


def _disagreement(parties: list[list[int]], number: int, stage: str) -> str:
    return (
        f"{shown(parties)} have different data in batch {number} of {stage}, but they compute one model together (tp, "
        "cp) and must see the same samples in the same order. Leave the samples to the trainer "
        "(Trainer(use_distributed_sampler=True)), or seed what is random (L.seed_everything, a generator with a fixed "
        "seed), or divide the samples by strategy.data_rank and strategy.data_size instead of the global rank"
    )
