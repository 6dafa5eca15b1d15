"""A checkpoint behind a batch, before the validation or the end of the epoch that follows it: a resume has both."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from lightning_automodel import DDPStrategy
from lightning_automodel.testing.pool import Pool
from tests.support.marks import with_long
from tests.support.training import make_trainer

ROWS = 8
TENSORS = TensorDataset(torch.arange(float(ROWS))[:, None])
RUNS: dict[str, dict[str, Any]] = {
    "epochs": {},
    "within epochs": {"val_check_interval": 2},
    "across epochs": {"check_val_every_n_epoch": None, "val_check_interval": 3},
    "accumulated": {"val_check_interval": 2, "accumulate_grad_batches": 3},
    "never": {"limit_val_batches": 0},
}


class Watcher(L.LightningModule):
    """Trains and validates on orders drawn from one generator, and notes what comes."""

    def __init__(self, shares_sampler: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.generator = torch.Generator().manual_seed(5)
        self.sampler = self.drawing() if shares_sampler else None
        self.seen: list[Any] = []

    def drawing(self) -> WeightedRandomSampler:
        return WeightedRandomSampler([*range(1, ROWS + 1)], ROWS, generator=self.generator)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TENSORS, sampler=self.sampler or self.drawing())

    val_dataloader = train_dataloader

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layer(batch[0] / ROWS).square().mean()
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        self.note("batch", batch_idx, batch[0].item(), self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean(), sync_dist=True)
        self.note("validation", batch_idx, batch[0].item())

    def on_train_epoch_end(self) -> None:
        self.note("end")

    def note(self, *what: Any) -> None:
        self.seen.append((self.current_epoch, self.global_step, *what))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}


class Stopping(EarlyStopping):
    """Notes what it is told at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__("loss", patience=9, check_on_train_epoch_end=True)
        self.told: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        super().on_train_epoch_end(trainer, module)
        self.told.append(float(trainer.callback_metrics["loss"]))


class SaveBehindBatches(L.Callback):
    """Notes for each file how much had been noted, and told, before."""

    def __init__(self, directory: Path, stopping: Stopping) -> None:
        self.directory, self.stopping = directory, stopping
        self.before: dict[str, tuple[int, int]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        name = f"{len(self.before)}.ckpt"
        trainer.save_checkpoint(self.directory / name)
        self.before[name] = len(module.seen), len(self.stopping.told)  # type: ignore[arg-type]


def fit(shares_sampler: bool, run: str, directory: Path, resume: str | None) -> tuple[Watcher, Stopping, Any]:
    L.seed_everything(3, verbose=False)
    module, stopping = Watcher(shares_sampler), Stopping()
    saver = SaveBehindBatches(directory, stopping)
    callbacks = [stopping, *([] if resume else [saver])]
    trainer = make_trainer(DDPStrategy(), callbacks=callbacks, max_epochs=3, **RUNS[run])
    trainer.fit(module, ckpt_path=resume and directory / resume)
    return module, stopping, saver


def save_and_resume(shares_sampler: bool, run: str, directory: Path) -> dict[str, Any]:
    """Runs on each rank: returns what was wrong, by file."""
    whole, stopping, saver = fit(shares_sampler, run, directory, None)
    batches, wrong = ROWS // int(torch.distributed.get_world_size()), {}
    for number, (name, (noted, told)) in enumerate(saver.before.items()):
        module, again, _ = fit(shares_sampler, run, directory, name)
        if (number + 1) % batches == 0:  # else means of epochs, and what monitors them, lack the part before
            expected = whole.seen[noted:], stopping.told[told:]
        else:
            expected = [each[:5] for each in whole.seen[noted:]], again.told
            module.seen = [each[:5] for each in module.seen]
        if (module.seen, again.told) != expected:
            wrong[name] = expected, module.seen, again.told
    return wrong


CASES = [(shares_sampler, run) for shares_sampler in (True, False) for run in RUNS]
QUICK = [(True, "accumulated"), (False, "epochs")]


@pytest.mark.slow
@pytest.mark.parametrize(("shares_sampler", "run"), with_long(CASES, *(case for case in CASES if case not in QUICK)))
def test_what_follows_a_batch_is_not_left_out(shares_sampler: bool, run: str, pool2: Pool, tmp_path: Path) -> None:
    for wrong in pool2.run(save_and_resume, shares_sampler, run, tmp_path, trainer=True, timeout=110):
        assert not wrong
