"""Habits of Lightning's users, found by its own tests (``tests/lightning_suite.py``), under both strategies."""

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.training import make_trainer

STRATEGIES = {"fsdp2": FSDP2TPStrategy, "ddp": DDPStrategy}


class Layer(L.LightningModule):
    """Keeps the entries of the checkpoint that it is shown."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.skips = skips
        self.layer = nn.Linear(4, 2)
        self.shown: set[str] = set()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        loss = self.layer(batch).square().mean()
        return None if self.skips else loss

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.shown = set(checkpoint)


class WithoutOptimizer(Layer):
    def configure_optimizers(self) -> None:
        return None


class Averaged(Layer):
    def configure_callbacks(self) -> Any:
        return [EMAWeightAveraging(decay=0.5)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_connected_module_is_saved_without_a_run(name: str, tmp_path: Path) -> None:
    trainer, module = make_trainer(STRATEGIES[name]()), Layer()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    loaded = Layer.load_from_checkpoint(tmp_path / "whole.ckpt")
    assert torch.equal(loaded.layer.weight, module.layer.weight)
    assert [trainer.strategy.reduce_boolean_decision(vote) for vote in (True, False)] == [True, False]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_trainer_can_be_copied(name: str) -> None:
    copied = copy.deepcopy(make_trainer(STRATEGIES[name]()))
    assert isinstance(copied.strategy, STRATEGIES[name])


def fit(strategy: str, module: Layer, directory: Path, epochs: int, resume: Path | None = None) -> Layer:
    saver = ModelCheckpoint(directory, "{epoch}", save_top_k=-1)
    run = make_trainer(STRATEGIES[strategy](), callbacks=[saver], max_epochs=epochs, enable_checkpointing=True)
    run.fit(module, ckpt_path=resume)
    return module


def run_habits(name: str, directory: Path) -> dict[str, Any]:
    fit(name, WithoutOptimizer(), directory / "none", 1)
    fit(name, WithoutOptimizer(), directory / "none", 2, directory / "none/epoch=0.ckpt")
    shown = fit(name, Layer(), directory / "shown", 1)
    again = fit(name, Layer(), directory / "shown", 2, directory / "shown/epoch=0.ckpt")
    fit(name, Averaged(), directory / "averaged", 1)
    skipping = fit(name, Layer(skips=True), directory / "skipped", 1)
    before = whole(skipping.layer.weight)
    skipping.skips = False
    fit(name, skipping, directory / "trained", 1)
    return {
        "none": sorted(path.name for path in (directory / "none").iterdir()),
        "first": sorted(shown.shown),
        "shown": again.shown,
        "averaged": any((directory / "averaged").iterdir()),
        "moved": float((whole(skipping.layer.weight) - before).abs().max()),
    }


def whole(weight: torch.Tensor) -> torch.Tensor:
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()


@pytest.mark.parametrize("name", STRATEGIES)
def test_habits_of_a_run(nursery: Nursery, name: str, tmp_path: Path) -> None:
    """A module without an optimizer, and one that adds an average of its weights; a last step that trains nothing, and
    then another run; hooks that look at all entries of a checkpoint.
    """
    [found] = Pool(nursery, 1).run(run_habits, name, tmp_path, trainer=True)
    assert found["none"] == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert found["averaged"]
    assert found["moved"] > 0
    lightning = {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks"}
    assert found["shown"] == lightning | {"optimizer_states", "lr_schedulers"}
