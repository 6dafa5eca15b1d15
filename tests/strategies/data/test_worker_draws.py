"""What worker processes draw: the order of one stream alike on all data ranks, which share it."""

import os
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_automodel.testing.pool import Pool
from tests.strategies.modules import Stream, TinyModule, rows, trainer


class Shuffling(Stream):
    """Draws its order where it is read."""

    def __iter__(self) -> Any:
        return ((rows(self.count)[i],) for i in torch.randperm(self.count).tolist())


def fit(workers: int) -> list[int]:
    """The rows that this rank trained on, of a run whose workers are seeded."""
    seeds = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
    with pytest.MonkeyPatch.context() as patch:
        for name in seeds:
            patch.setenv(name, "")  # put back afterwards
        L.seed_everything(3, workers=True, verbose=False)
        module = TinyModule()
        run = trainer(int(os.environ["WORLD_SIZE"]), {})
        run.fit(module, DataLoader(Shuffling(12), batch_size=2, num_workers=workers))
    return module.seen["train"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_shuffles_is_shared_without_doubles(workers: int, pool2: Pool) -> None:
    shares = pool2.run(fit, workers, trainer=True)
    assert sorted(shares[0] + shares[1]) == list(range(12))
