"""Samplers of users that keep something from pass to pass: orders of each epoch are those of one device, also where
loaders are made anew, and in a run that resumes.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_automodel import DDPStrategy
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.marks import with_long
from tests.support.samplers import ByNumpy, drawing
from tests.support.training import make_trainer, world_size

ROWS, EPOCHS = 16, 4
Seen = list[tuple[int, list[int]]]


class Told(Sampler):
    """Draws by the number of the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(ROWS).tolist())


KINDS: dict[str, Any] = {
    "drawing": lambda: {"sampler": drawing(ROWS)},
    "by numpy": lambda: {"sampler": ByNumpy(ROWS)},
    "told": lambda: {"sampler": Told()},
    "dealt": lambda: {"batch_sampler": ByNumpy(ROWS, 2)},
    "read by workers": lambda: {"sampler": drawing(ROWS), "num_workers": 1},
    "validated, too": lambda: {"sampler": drawing(ROWS)},
    "seeds drawn alike": lambda: {"sampler": (order := drawing(ROWS)), "generator": order.generator},
}


class Watcher(L.LightningModule):
    """Notes epoch and rows of every step, of loaders that it keeps or makes anew when asked."""

    def __init__(self, kind: str, is_kept: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.kind, self.is_kept = kind, is_kept
        self.kept: dict[str, DataLoader] = {}
        self.seen: Seen = []
        self.validated: Seen = []

    def loader(self, stage: str) -> DataLoader:
        stage = "any" if self.kind == "validated, too" else stage
        if stage not in self.kept or not self.is_kept:
            self.kept[stage] = DataLoader(TensorDataset(torch.arange(ROWS).float()[:, None]), **KINDS[self.kind]())
        return self.kept[stage]

    def train_dataloader(self) -> DataLoader:
        return self.loader("train")

    def val_dataloader(self) -> DataLoader:
        return self.loader("validate")

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.seen.append((self.current_epoch, batch[0][:, 0].int().tolist()))
        return self.layer(batch[0]).mean()

    def validation_step(self, batch: list[Tensor]) -> None:
        self.validated.append((self.current_epoch, batch[0][:, 0].int().tolist()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.001)


class Save(L.Callback):
    """Saves in the first two epochs: before the first batch, in the last validation and behind it; and between."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == trainer.num_training_batches * 3 // 2:
            trainer.save_checkpoint(self.path / "middle")

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if index == 0:
            self.save(trainer, "begin")

    def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.save(trainer, "validated")

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.save(trainer, "end")

    def save(self, trainer: L.Trainer, place: str) -> None:
        if trainer.current_epoch < 2 and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path / f"{place} {trainer.current_epoch}")


def fit(kind: str, is_kept: bool, every: int, path: Path, resume: str | None) -> tuple[Seen, Seen]:
    """Runs on each rank, with Lightning's own strategy if it is one."""
    L.seed_everything(5, verbose=False)
    module, strategy = Watcher(kind, is_kept), DDPStrategy() if world_size() > 1 else "auto"
    settings: dict[str, Any] = {"max_epochs": EPOCHS, "reload_dataloaders_every_n_epochs": every}
    trainer = make_trainer(strategy, callbacks=[] if resume else [Save(path)], **settings)  # type: ignore[arg-type]
    trainer.fit(module, ckpt_path=path / resume if resume else None)
    return module.seen, module.validated


def run(kind: str, is_kept: bool, every: int, path: Path) -> dict[str | None, tuple[Seen, Seen]]:
    """Runs on each rank: whole, and resumed on more than one."""
    places = [f"{place} {epoch}" for epoch in range(2) for place in ("begin", "validated", "end")]
    resumes = (None, *places, "middle") if world_size() > 1 else (None,)
    return {resume: fit(kind, is_kept, every, path, resume) for resume in resumes}


def rows(seen: Seen, epoch: int) -> list[list[int]]:
    return [batch for number, batch in seen if number == epoch]


EVERY = [(kind, is_kept, every) for kind in KINDS for is_kept in (True, False) for every in (0, 1, 2)]
EVERY = [case for case in EVERY if case[0] not in ("seeds drawn alike", "validated, too") or case[2] == 0]
QUICK = [
    ("drawing", True, 1),
    ("validated, too", True, 0),
    ("dealt", False, 1),
    ("by numpy", False, 2),
    ("read by workers", True, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_kept", "every"), with_long(EVERY, *(case for case in EVERY if case not in QUICK)))
def test_orders_are_those_of_one_device(
    kind: str, is_kept: bool, every: int, nursery: Nursery, pool2: Pool, tmp_path: Path
) -> None:
    (one, _), *_ = (
        each[None] for each in Pool(nursery, 1).run(run, kind, is_kept, every, tmp_path / "1", trainer=True)
    )
    ranks = pool2.run(run, kind, is_kept, every, tmp_path / "2", trainer=True, timeout=110)
    for epoch in range(EPOCHS):
        together = chain(*zip(*(rows(rank[None][0], epoch) for rank in ranks), strict=True))
        assert [*together] == rows(one, epoch), epoch
    for rank in ranks:
        whole, validated = rank.pop(None)
        for resume, (again, validated_again) in rank.items():
            assert again == whole[-len(again) :], resume
            if not resume.startswith("begin"):  # Lightning begins a pass of validation more there, and reads none of it
                assert validated_again == validated[-len(validated_again) :], resume
