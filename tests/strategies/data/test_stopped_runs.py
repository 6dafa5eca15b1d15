"""Runs that `max_steps` has ended, saved as users save them: two that follow each other train what one does."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.data.test_seen_samples import Step, Watcher, data_of
from tests.strategies.modules import loader
from tests.support.marks import with_long
from tests.support.training import make_trainer, world_size

SIZE, STEPS = 2, 14  # batches of two rows of each rank, of 23: an epoch is 12 steps on one process, and 6 on two


def run(kind: str, resume: Path | None, saver: Path | None, validates: bool, **end: int) -> tuple[list[Step], int]:
    """Trains until ``end``, and saves behind every epoch, or when all is over if ``saver`` is a file."""
    L.seed_everything(5, verbose=False)
    module, by_callback = Watcher(), saver is not None and not saver.suffix
    callbacks = [ModelCheckpoint(saver, "saved", enable_version_counter=False)] if by_callback else []
    trainer = make_trainer({}, callbacks=callbacks, enable_checkpointing=by_callback, **end)
    trainer.fit(module, data_of(kind, SIZE), loader(2) if validates else None, ckpt_path=resume)
    if saver is not None and not by_callback:
        trainer.save_checkpoint(saver)
    return module.steps, trainer.current_epoch


def whole_and_again(kind: str, validates: bool, path: Path) -> dict[str, Any]:
    """Runs on each rank: what one run trains on, and what two do that follow each other."""
    length, found = 12 // world_size(), {}
    for end in ({"max_steps": STEPS}, {"max_epochs": 2}):
        whole, epochs = run(kind, None, None, validates, **end)
        for stop in (4, length):
            for saver in (path / f"{stop}", path / f"{stop}.ckpt"):
                first, _ = run(kind, None, saver, validates, max_steps=stop)
                saved = saver if saver.suffix else saver / "saved.ckpt"
                again, at_end = run(kind, saved, None, validates, **end)
                found[f"{end} {saver.name}"] = [first + again, at_end], [whole, epochs]
    return found


EVERY = [
    (kind, ranks, validates)
    for kind in ("shuffled", "counted", "stream")
    for ranks in (1, 2)
    for validates in (False, True)
]
QUICK = [("shuffled", 1, False), ("counted", 2, True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "validates"), with_long(EVERY, *(case for case in EVERY if case not in QUICK))
)
def test_two_runs_are_one(kind: str, ranks: int, validates: bool, nursery: Nursery, tmp_path: Path) -> None:
    """Within an epoch and at its end; by steps and by epochs; saved by Lightning's callback, and behind ``fit``."""
    for found in Pool(nursery, ranks).run(whole_and_again, kind, validates, tmp_path, trainer=True):
        for case, (again, whole) in found.items():
            assert again == whole, case
