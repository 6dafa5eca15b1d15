"""Samplers of users, and generators, that several things read in turns: a run that resumes goes on in their orders."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

from lightning_automodel import DDPStrategy
from lightning_automodel.testing.pool import Pool
from tests.support.marks import with_long
from tests.support.samplers import ByNumpy, drawing
from tests.support.training import make_trainer

ROWS = 16
DATA = TensorDataset(torch.arange(ROWS).float()[:, None])
Step = tuple[int, list[int]]
Loaders = tuple[Any, DataLoader]
HOOKS = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_batch_start", "on_validation_batch_end", "on_validation_end"),
)


class Counting(Sampler):
    """Turns its order by one more in each pass."""

    passes = 0

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from ((row * 5 + self.passes) % ROWS for row in range(ROWS))


def both(**arguments: Any) -> Loaders:
    """Loaders of training and of validation that are made alike."""
    return DataLoader(DATA, **arguments), DataLoader(DATA, **arguments)


def two(sampler: Any, rows: int = ROWS) -> Loaders:
    """Two loaders of training. Of fewer ``rows`` than the sampler gives, the second ends earlier and begins anew."""
    pair = [DataLoader(DATA, sampler=sampler), DataLoader(DATA, sampler=sampler, batch_size=ROWS // rows)]
    return pair, DataLoader(DATA)


def drawn_alike() -> Loaders:
    order = drawing(ROWS)
    return DataLoader(DATA, sampler=order, generator=order.generator), DataLoader(DATA)


def one_generator() -> Loaders:
    """Samplers of their own that draw from one generator."""
    drawn = torch.Generator().manual_seed(5)
    train, validate = (WeightedRandomSampler([*range(1, ROWS + 1)], ROWS, generator=drawn) for _ in range(2))
    return DataLoader(DATA, sampler=train), DataLoader(DATA, sampler=validate)


KINDS: dict[str, Callable[[], Loaders]] = {
    "drawing": lambda: both(sampler=drawing(ROWS)),
    "by numpy": lambda: both(sampler=ByNumpy(ROWS)),
    "counting": lambda: both(sampler=Counting()),
    "two trained": lambda: two(ByNumpy(ROWS)),
    "two trained, one again": lambda: two(drawing(ROWS), ROWS // 2),
    "seeds drawn alike": drawn_alike,
    "one generator": one_generator,
}


class Watcher(L.LightningModule):
    """Notes epoch and rows of every step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.loaders = KINDS[kind]()
        self.seen: list[Step] = []
        self.validated: list[Step] = []

    def train_dataloader(self) -> Any:
        return self.loaders[0]

    def val_dataloader(self) -> DataLoader:
        return self.loaders[1]

    def rows(self, batch: Any) -> Step:
        parts = batch if isinstance(batch[0], list) else [batch]
        return self.current_epoch, [int(row) for part in parts for row in part[0].flatten()]

    def training_step(self, batch: Any) -> Tensor:
        self.seen.append(step := self.rows(batch))
        return self.layer(torch.tensor(step[1]).float()[:, None]).mean()

    def validation_step(self, batch: Any) -> None:
        self.validated.append(self.rows(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.001)


class Save(L.Callback):
    """Saves in hooks of the first two epochs, but where a run that resumes leaves a validation out: right before it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.names: list[str] = []

    def save(self, trainer: L.Trainer, hook: str) -> None:
        is_before_validation = hook == "on_train_batch_end" and trainer.fit_loop.epoch_loop.batch_idx % 3 == 2
        if trainer.current_epoch < 2 and not trainer.sanity_checking and not is_before_validation:
            self.names.append(f"{len(self.names)} {hook}")
            trainer.save_checkpoint(self.directory / self.names[-1])


for _hook in HOOKS:
    setattr(Save, _hook, lambda self, trainer, *_, hook=_hook, **__: self.save(trainer, hook))


def fit(kind: str, every: int, path: Path | None, *callbacks: L.Callback) -> Watcher:
    L.seed_everything(5, verbose=False)
    module = Watcher(kind)
    settings: dict[str, Any] = {"reload_dataloaders_every_n_epochs": every, "val_check_interval": 3}
    trainer = make_trainer(DDPStrategy(), callbacks=[*callbacks], max_epochs=3, limit_val_batches=2, **settings)
    trainer.fit(module, ckpt_path=path)
    return module


def save_and_resume(kind: str, every: int, directory: Path) -> dict[str, Any]:
    """Runs on each rank: returns what was unlike, by file."""
    saver = Save(directory)
    whole, wrong = fit(kind, every, None, saver), {}
    for name in saver.names:
        again = fit(kind, every, directory / name)
        for part in ("seen", "validated"):
            expected, found = getattr(whole, part), getattr(again, part)
            if found != expected[len(expected) - len(found) :]:
                wrong[f"{name}, {part}"] = found, expected
    return wrong


CASES = [*((kind, every) for kind in KINDS for every in (0, 1, 2))]
QUICK = [("drawing", 0), ("by numpy", 1), ("two trained, one again", 0), ("seeds drawn alike", 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "every"), with_long(CASES, *(case for case in CASES if case not in QUICK)))
def test_a_run_goes_on_in_their_orders(kind: str, every: int, pool2: Pool, tmp_path: Path) -> None:
    for wrong in pool2.run(save_and_resume, kind, every, tmp_path, trainer=True, timeout=110):
        assert not wrong, "\n".join(f"{name}: {unlike}" for name, unlike in wrong.items())
