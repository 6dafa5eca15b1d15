"""A run whose schedule asks for the number of steps when it is made resumes within an epoch."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from lightning_automodel import DDPStrategy
from lightning_automodel.testing.pool import Pool
from tests.strategies.data.test_seen_samples import Step, Watcher, both, data_of, record
from tests.strategies.modules import loader
from tests.support.training import make_trainer

KINDS: dict[str, dict[str, Any]] = {
    "shuffled": {"count": 8},
    "counted": {"count": 8},
    "with a state": {"count": 6},
    "workers": {"count": 9, "reload_dataloaders_every_n_epochs": 2},
    "drawing": {"count": 9, "val_check_interval": 3},
    "by numpy": {"count": 3},
    "sized stream": {"count": 4, "limit_train_batches": 5},
    "stream": {"count": 9, "max_steps": 15},
}


class Estimating(Watcher):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        assert isinstance(self.trainer.train_dataloader, DataLoader)  # as the user gave it
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 1e-3, total_steps=steps), "interval": "step"}]


class EstimatingInSetup(Watcher):
    def setup(self, stage: str) -> None:
        self.estimated = int(self.trainer.estimated_stepping_batches)


def run(path: Path, module: type[Watcher]) -> dict[str, Any]:
    """Runs on each rank."""
    return {kind: both(path, kind, module=module, **settings) for kind, settings in KINDS.items()}


@pytest.mark.parametrize("module", [Estimating, EstimatingInSetup])
def test_steps_are_estimated_early(pool2: Pool, tmp_path: Path, module: type[Watcher]) -> None:
    """Which sets the loaders up, before the place in the epoch is known, or before there is a model."""
    for found in pool2.run(run, tmp_path, module, trainer=True):
        for kind, (expected, steps, *validated) in found.items():
            assert steps == expected, kind
            assert validated[0] == validated[1], kind


def samples(path: Path, module: type[Watcher]) -> list[Step]:
    """Runs on each rank: what a run of three epochs is given, of 23 samples in an order of the user's."""
    return record("drawing", path / "x.ckpt", 2, None, None, module=module).steps


def test_who_asks_early_is_given_the_same(pool2: Pool, tmp_path: Path) -> None:
    """Lightning's own sampler would give samples twice."""
    for early, late in zip(
        pool2.run(samples, tmp_path, EstimatingInSetup, trainer=True),
        pool2.run(samples, tmp_path, Watcher, trainer=True),
        strict=True,
    ):
        assert early == late


class FailsOnce(Estimating):
    def on_fit_start(self) -> None:
        if not self.steps and not vars(self).setdefault("has_failed", False):
            self.has_failed = True
            raise ValueError("a mistake that is mended")


def try_again(path: Path) -> tuple[list[Step], list[Step]]:
    """Runs on each rank: a resume that fails before it trains, and the same call once more."""
    whole = record("shuffled", path, 2, 4, None, module=Estimating)
    module, trainer = FailsOnce(), make_trainer(DDPStrategy(), max_epochs=3)
    L.seed_everything(5, verbose=False)
    for _ in range(2):
        with suppress(ValueError):
            trainer.fit(module, data_of("shuffled", 2), loader(2), ckpt_path=path)
    return whole.steps[4:], module.steps


def test_a_call_that_failed_before_it_trained_is_made_again(pool2: Pool, tmp_path: Path) -> None:
    for expected, steps in pool2.run(try_again, tmp_path / "x.ckpt", trainer=True):
        assert steps == expected
