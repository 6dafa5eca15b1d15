"""A run whose schedule asks for the number of steps when it is made resumes within an epoch."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
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


def run(path: Path) -> dict[str, Any]:
    """Runs on each rank."""
    return {kind: both(path, kind, module=Estimating, **settings) for kind, settings in KINDS.items()}


def test_steps_are_estimated_in_configure_optimizers(pool2: Pool, tmp_path: Path) -> None:
    """Which sets the loaders up, before the place in the epoch is known."""
    for found in pool2.run(run, tmp_path, trainer=True):
        for kind, (expected, steps, *validated) in found.items():
            assert steps == expected, kind
            assert validated[0] == validated[1], kind


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
