"""A checkpoint may be saved in any hook: each of a run's resumes, and trains on what the run did behind it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_automodel import DDPStrategy
from lightning_automodel.finetuning.loader import ResumableLoader
from lightning_automodel.testing.pool import Pool
from tests.support.marks import with_long
from tests.support.samplers import ByNumpy, drawing
from tests.support.training import make_trainer

ROWS = 8  # four batches of an epoch on two data ranks
TENSORS = TensorDataset(torch.arange(float(ROWS))[:, None] / ROWS)
HOOKS = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end", "on_train_end"),
    *("on_validation_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_end", "on_fit_end"),
)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(TENSORS)

    def __len__(self) -> int:
        return ROWS


class Lengthless(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(TENSORS)


LOADERS: dict[str, Callable[[], DataLoader]] = {
    "shuffled": lambda: DataLoader(TENSORS, shuffle=True),
    "counting": lambda: ResumableLoader(TENSORS, shuffle=True),
    "stream": lambda: DataLoader(Stream()),
    "drawing": lambda: DataLoader(TENSORS, sampler=drawing(ROWS)),
    "by numpy": lambda: DataLoader(TENSORS, sampler=ByNumpy(ROWS)),
    "stateful": lambda: StatefulDataLoader(TENSORS, shuffle=True),
    "stateful stream": lambda: StatefulDataLoader(Stream()),
    "lengthless": lambda: DataLoader(Lengthless()),
    "dealt": lambda: DataLoader(TENSORS, batch_sampler=ByNumpy(ROWS, 2)),
}
RUNS: dict[str, dict[str, Any]] = {
    "epochs": {},
    "accumulated": {"accumulate_grad_batches": 3, "val_check_interval": 2},
    "steps": {"max_epochs": -1, "max_steps": 6},
    "without validation": {"limit_val_batches": 0},
    "made anew": {"reload_dataloaders_every_n_epochs": 1},
    "validated across epochs": {"check_val_every_n_epoch": None, "val_check_interval": 3},
    "short epochs": {"limit_train_batches": 3, "accumulate_grad_batches": 2, "num_sanity_val_steps": 1},
}


class Watcher(L.LightningModule):
    """Notes number, rows and loss of every batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 4))
        self.kind = kind
        self.seen: list[list[float]] = []

    def train_dataloader(self) -> DataLoader:
        return LOADERS[self.kind]()

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TENSORS)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layers(batch[0]).square().mean()
        self.seen.append([self.current_epoch, batch_idx, *batch[0].flatten().tolist(), loss.item()])
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.layers(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7), "interval": "step"}]


class SaveInEachHook(L.Callback):
    """Notes for each file how many batches had begun."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.begun: dict[str, int] = {}

    def save(self, trainer: L.Trainer, hook: str) -> None:
        if not trainer.sanity_checking:
            name = f"{len(self.begun)} {hook}"
            trainer.save_checkpoint(self.directory / name)
            self.begun[name] = len(trainer.lightning_module.seen)  # type: ignore[arg-type]


for _hook in HOOKS:
    setattr(SaveInEachHook, _hook, lambda self, trainer, *_, hook=_hook, **__: self.save(trainer, hook))


def fit(kind: str, run: str, resume: Path | None, *callbacks: L.Callback) -> tuple[Watcher, int]:
    L.seed_everything(3, verbose=False)
    module = Watcher(kind)
    trainer = make_trainer(DDPStrategy(), callbacks=[*callbacks], **{"max_epochs": 2, **RUNS[run]})
    trainer.fit(module, ckpt_path=resume)
    return module, trainer.global_step


def save_and_resume(kind: str, run: str, directory: Path) -> dict[str, str]:
    """Runs on each rank: returns what was wrong, by file."""
    saver = SaveInEachHook(directory)
    whole, steps = fit(kind, run, None, saver)
    micro_batches: int = RUNS[run].get("accumulate_grad_batches", 1)
    wrong = {}
    for name, begun in saver.begun.items():
        module, steps_again = fit(kind, run, directory / name)
        through = len(whole.seen) - len(module.seen)
        try:
            assert begun - micro_batches <= through <= begun, "batches"
            assert steps_again == steps, "steps"
            close = {"atol": 1e-6, "rtol": 0.0}
            torch.testing.assert_close(torch.tensor(module.seen), torch.tensor(whole.seen[through:]), **close)
            torch.testing.assert_close(module.state_dict(), whole.state_dict(), **close)
        except AssertionError as error:
            wrong[name] = f"{begun} batches had begun, resumed behind {through}: {error}"
    assert len(saver.begun) > 30
    return wrong


# A loader whose own state is behind the batch within which a hook saves is warned of, and not here.
CASES = [(kind, run) for kind in LOADERS for run in RUNS]
QUICK = [("counting", "short epochs"), ("counting", "accumulated"), ("by numpy", "made anew"), ("stream", "steps")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "run"), with_long(CASES, *(case for case in CASES if case not in QUICK)))
def test_a_run_goes_on_from_any_hook(kind: str, run: str, pool2: Pool, tmp_path: Path) -> None:
    for wrong in pool2.run(save_and_resume, kind, run, tmp_path, trainer=True, timeout=110):
        assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
